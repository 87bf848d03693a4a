"""OpenEnv's own capture proxy before an episode of ours: it finds an engine that gives tokens, and has our ids."""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from openenv_support import base_url

from control_support import OpenDoor
from published_validator import PYTHON, needs_openenv
from waiting import wait_until_sync

pytestmark = [pytest.mark.agents, needs_openenv]
START_S = 60


@contextmanager
def capture(episode: dict[str, Any], log: Path) -> Iterator[str]:
    """The proxy's address, as its own command starts it; stopped at the end."""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
    bearer = {"authorization": f"Bearer {episode['episode_key']}"}
    served = httpx.get(f"{episode['model_url']}/v1/models", headers=bearer, timeout=60).json()["data"][0]["id"]
    module = "openenv.core.harness.capture.server"
    flags = ["--llm-url", f"{episode['model_url']}/v1", "--model", served, "--port", str(port)]
    env = {**os.environ, "OPENENV_LLM_API_KEY": episode["episode_key"]}
    with log.open("w") as output:
        process = subprocess.Popen(
            [PYTHON, "-m", module, "--host", "127.0.0.1", *flags], env=env, stdout=output, stderr=output
        )
    url = f"http://127.0.0.1:{port}"

    def healthy() -> bool:
        assert process.poll() is None, log.read_text()
        try:
            return httpx.get(f"{url}/health").status_code == 200
        except httpx.TransportError:
            return False

    try:
        wait_until_sync(healthy, within_s=START_S)
        yield url
    finally:
        process.kill()
        process.wait()


@pytest.mark.thorough
def test_its_rows_are_our_rows(open_door: OpenDoor, tmp_path: Path) -> None:
    with open_door() as door, httpx.Client(base_url=base_url(door), timeout=60) as control:
        episode = control.post("/episodes", json={"task": {"instruction": "x"}}).json()
        with capture(episode, tmp_path / "log") as url:
            session = httpx.post(f"{url}/sessions", json={}, timeout=60).raise_for_status().json()
            assert session["capture_level"] == "tokens", (tmp_path / "log").read_text()
            messages: list[dict[str, Any]] = [{"role": "user", "content": "hello"}]
            for _ in range(3):
                answer = httpx.post(
                    f"{url}/v1/chat/completions",
                    json={"model": "policy", "messages": messages, "max_tokens": 16},
                    headers={"authorization": f"Bearer {session['session_id']}"},
                    timeout=60,
                ).raise_for_status()
                said = answer.json()["choices"][0]["message"]
                messages += [{"role": "assistant", "content": said["content"]}, {"role": "user", "content": "on"}]
            rollout = httpx.get(f"{url}/sessions/{session['session_id']}/rollout").raise_for_status().json()
        ours = _sampled(control, episode)
    theirs = {
        tuple(token for token, trained in zip(row["input_ids"], row["loss_mask"], strict=True) if trained): row
        for row in rollout["sequences"]
        if row["trainable"]
    }
    assert theirs
    for sampled, row in theirs.items():
        assert any(contains(one, sampled) for one in ours), (sampled, ours)
        assert len(row["logprobs"]) == len(row["input_ids"])


def _sampled(control: httpx.Client, episode: dict[str, Any]) -> list[tuple[int, ...]]:
    """The sampled ids of each row, those included that no token has and that only their proxy trains."""
    found = control.get(
        f"/episodes/{episode['episode_id']}/samples", headers={"accept": "application/json"}
    ).json()
    return [
        tuple(token for span in row["turn_spans"] for token in row["input_ids"][span["start"] : span["end"]])
        for row in found["samples"]
    ]


def contains(row: tuple[int, ...], part: tuple[int, ...]) -> bool:
    return any(row[at : at + len(part)] == part for at in range(len(row) - len(part) + 1))
