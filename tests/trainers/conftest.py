"""A viewer of the recorded run, for this Python and for those of the trainers."""

from __future__ import annotations

import tarfile
from collections.abc import Iterator

import pytest

from control_support import KEY, Door
from trainers.recorded_run import recorded_rollouts
from turnstile import Client
from turnstile.rollout import Rollout
from ui.conftest import RECORDED, folder_viewer


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
