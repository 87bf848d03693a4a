from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import httpx
import pytest
from gate_support import requests_begun

from control_support import Door, OpenDoor, engine, open_door, stranger_to
from turnstile_server.http.connections import Seat

__all__ = ["engine", "open_door"]


@pytest.fixture(scope="session")
def door(open_door: OpenDoor) -> Iterator[Door]:
    with open_door(control={"heartbeat_s": 0.05}, episodes={"max_subscribers": 2}) as running:
        yield running


@pytest.fixture
async def http(door: Door) -> AsyncIterator[httpx.AsyncClient]:
    headers = {"authorization": f"Bearer {door.key}"}
    async with httpx.AsyncClient(base_url=door.url, headers=headers, timeout=60) as client:
        yield client


@pytest.fixture
async def stranger(door: Door) -> AsyncIterator[httpx.AsyncClient]:
    """Without the key."""
    async with stranger_to(door) as client:
        yield client


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> list[Seat]:
    """The places of the requests that servers of this process have begun to serve."""
    return requests_begun(monkeypatch)
