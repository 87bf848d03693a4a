"""The clients of the newest ``openenv``, as published, in an environment of their own, play the right episode."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from control_support import OpenDoor

PYTHON = os.environ.get("TURNSTILE_OPENENV_PYTHON")
PROGRAM = Path(__file__).with_name("published_clients.py")
SOURCE = """
- {id: first, instruction: x, answer: {kind: exact, value: nothing}}
- {id: wanted, instruction: What is six times seven?, answer: {kind: exact, value: '42'}}
- {id: other, instruction: x, answer: {kind: exact, value: '54'}}
"""

pytestmark = [
    pytest.mark.agents,
    pytest.mark.skipif(not PYTHON, reason="set TURNSTILE_OPENENV_PYTHON (scripts/ci_installs.sh)"),
]


@pytest.fixture
def source(tmp_path: Path) -> str:
    (tmp_path / "tasks.yaml").write_text(SOURCE)
    return str(tmp_path / "tasks.yaml")


def played(*arguments: str) -> Any:
    done = subprocess.run(
        [str(PYTHON), PROGRAM, *arguments], capture_output=True, text=True, check=False, timeout=200
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_every_client_plays_the_task_it_asks_for_in_one_episode(open_door: OpenDoor, source: str) -> None:
    with open_door(tasks={"sources": [source]}) as door:
        found = played(door.url, door.key)
    assert len(found["played"]) == 11
    for name, one in found["played"].items():
        expected = {"task": "wanted", "tools": 1, "reward": 1.0, "status": "completed", "more_episodes": 0}
        assert one == expected, name
    assert found["open"] == 0


def test_a_server_in_production_mode_is_played_without_reset(open_door: OpenDoor, source: str) -> None:
    with open_door(tasks={"sources": [source]}, openenv={"mode": "production"}) as door:
        found = played("production", door.url, door.key)
    assert "production mode" in found.pop("refused")
    assert found == {"task": "first", "tools": 1, "reward": 1.0, "status": "completed"}
