"""A viewer of the recorded run, for this Python and for those of the trainers."""

from __future__ import annotations

import json
import tarfile
from collections.abc import Iterator

import pytest

from control_support import KEY, Door, OpenDoor, engine, open_door
from trainers.recorded_run import recorded_rollouts
from turnstile import Client
from turnstile.rollout import Rollout
from ui.conftest import RECORDED, folder_viewer

__all__ = ["engine", "open_door"]


@pytest.fixture(scope="session")
def recorded_door(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Door]:
    folder = tmp_path_factory.mktemp("recorded")
    with tarfile.open(RECORDED) as archive:
        archive.extractall(folder)
    with folder_viewer(folder) as url:
        yield Door(url, KEY, "", folder)


@pytest.fixture(scope="session")
def rollouts(recorded_door: Door) -> list[Rollout]:
    with Client(recorded_door.url, key=recorded_door.key) as client:
        return recorded_rollouts(client)


@pytest.fixture(scope="session")
def playing_door(open_door: OpenDoor, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Door]:
    """A server that launches agents on two short tasks."""
    source = tmp_path_factory.mktemp("tasks") / "tasks.jsonl"
    sums = [{"id": f"sum-{n}", "instruction": f"{n} + 3?", "answer": {"value": str(n + 3)}} for n in (1, 2)]
    source.write_text("".join(json.dumps(task) + "\n" for task in sums))
    bounds = {"max_open": 4, "max_running": 4, "max_turns": 2, "max_completion_tokens": 16}
    with open_door(sandboxes={"kind": "local"}, tasks={"sources": [source]}, episodes=bounds) as running:
        yield running
