from __future__ import annotations

from collections.abc import Iterator

import pytest

from control_support import Door, OpenDoor, engine, open_door

__all__ = ["engine", "open_door"]


@pytest.fixture(scope="session")
def door(open_door: OpenDoor) -> Iterator[Door]:
    with open_door() as running:
        yield running
