"""What a server says of its sandboxes, and that it says the same everywhere where it has none."""

from __future__ import annotations

import httpx
import pytest

from control_support import OpenDoor
from turnstile.models import SandboxInfo


def test_a_server_without_a_backend_says_the_same_in_the_log_in_its_state_and_in_every_refusal(
    open_door: OpenDoor, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")  # no bwrap
    with (
        caplog.at_level("INFO"),
        open_door(sandboxes={"kind": "auto", "docker_host": "unix:///nowhere/docker.sock"}) as door,
        httpx.Client(base_url=door.url, headers={"authorization": f"Bearer {door.key}"}, timeout=60) as http,
    ):
        found = SandboxInfo.model_validate_json(http.get("/sandboxes").content)
        refused = http.post("/episodes", json={"task": {"id": "add-slugify"}, "agent": "tool-loop"})
        served = http.post("/episodes", json={"task": {"instruction": "say hello"}})
    assert found.kind == "none"
    assert found.missing is not None
    assert "there is no `bwrap`" in found.missing
    assert "Start Docker" in found.missing
    assert refused.status_code == 422
    assert found.missing in refused.json()["error"]["message"]
    (line,) = [record for record in caplog.records if record.getMessage().startswith("sandboxes: ")]
    assert (line.levelname, line.getMessage()) == ("WARNING", f"sandboxes: none: {found.missing}")
    assert served.status_code == 201  # an episode that needs no sandbox


def test_the_state_names_the_backend_and_the_limits_that_hold(open_door: OpenDoor) -> None:
    with open_door(sandboxes={"kind": "local", "allow_unisolated": True}) as door:
        assert httpx.get(f"{door.url}/sandboxes").status_code == 401
        found = httpx.get(f"{door.url}/k/{door.key}/sandboxes").json()
    assert found["kind"] == "local"
    assert found["missing"] is None
    if found["isolated"]:
        assert found["description"].startswith("local: bubblewrap, ")
        assert "; limits: " in found["description"]
    else:
        assert "NO ISOLATION" in found["description"]
