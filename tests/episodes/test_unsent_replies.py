"""``kill -9`` between a durable turn and its reply, of a server whose agents run in sandboxes: what was not
delivered is not trained, what was delivered is."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import anyio
import pytest
from test_killed_server import acknowledged, containers
from test_whole_episodes import server

from turnstile.models import Turn

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(300)]

EPISODES = 4


@pytest.mark.thorough
@pytest.mark.parametrize(
    "kind", [pytest.param("local", marks=pytest.mark.slow), pytest.param("docker", marks=pytest.mark.docker)]
)
async def test_a_turn_whose_reply_a_killed_server_never_sent_is_untrained(
    tiny_model: Path, tmp_path: Path, kind: str, request: pytest.FixtureRequest
) -> None:
    image = request.getfixturevalue("docker_image") if kind == "docker" else "unused"
    await die(tiny_model, tmp_path, kind, image)
    unsent = (tmp_path / "unsent").read_text()
    assert kind == "local" or len(containers(tmp_path / "data")) >= EPISODES
    async with server(tiny_model, tmp_path, sandboxes={"kind": kind, "docker_image": image}) as stage:
        shown = (await stage.control.get("/episodes")).json()["episodes"]
        assert len(shown) == EPISODES
        reasons: dict[str, str] = {}
        for episode in shown:
            assert (episode["status"], episode["error"]["type"]) == ("failed", "server_restarted")
            turns = [Turn.model_validate(turn) for turn in (await stage.get(episode, "/turns"))["turns"]]
            found = await stage.get(episode, "/samples?include_untrained=true")
            untrained = {
                row["turn_id"]: row["reason"] for row in found["untrained"] if row["reason"] != "id_without_token"
            }
            trained = {
                span["turn_id"] for row in found["samples"] for span in row["turn_spans"] if span["trained"]
            }
            assert trained | set(untrained) == {turn.turn_id for turn in turns}
            assert not trained & set(untrained)
            assert acknowledged(turns) <= trained, "its agent told the id of the reply in its next call"
            assert set(untrained) <= {turn.turn_id for turn in turns[-1:]}, "only of its last can nothing be known"
            assert_sums(found, trained, turns)
            reasons |= untrained
        assert reasons[unsent] == "delivery_unknown"
    assert kind == "local" or containers(tmp_path / "data") == []


def assert_sums(found: dict[str, Any], trained: set[str], turns: list[Turn]) -> None:
    counts = {turn.turn_id: len(turn.completion_ids) - len(turn.without_token) for turn in turns}
    tokens = sum(counts[turn_id] for turn_id in trained)
    assert found["stats"]["trained_tokens"] == tokens == sum(sum(row["loss_mask"]) for row in found["samples"])


async def die(model: Path, folder: Path, kind: str, image: str) -> None:
    """Runs ``unsent_child.py`` until it has killed itself."""
    child = Path(__file__).with_name("unsent_child.py")
    path = os.pathsep.join(entry for entry in sys.path if entry)
    with anyio.fail_after(200):
        done = await anyio.run_process(
            [sys.executable, child, model, folder, kind, image, str(EPISODES)],
            env={**os.environ, "PYTHONPATH": path},
            check=False,
        )
    assert done.returncode == -signal.SIGKILL, done.stderr.decode()
