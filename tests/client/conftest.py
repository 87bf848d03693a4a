"""Both clients behind one async face, so that one suite holds both to the same claims."""

from __future__ import annotations

import inspect
import json
from collections.abc import AsyncIterator, Callable, Iterator
from functools import partial
from typing import Any

import anyio.to_thread
import pytest

from control_support import Door, OpenDoor, engine, open_door
from turnstile import AsyncClient, Client, ClientSettings

__all__ = ["engine", "open_door"]

QUICK = ClientSettings(retries=1, retry_delay_s=0.05, poll_s=0.2, connect_s=60.0, down_s=60.0)

Make = Callable[..., Any]


class Blocking:
    """Awaits a blocking object's methods in a thread; handles that they return are wrapped too."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._inner, name)
        if not callable(value):
            return value

        async def call(*args: Any, **kwargs: Any) -> Any:
            result = await anyio.to_thread.run_sync(partial(value, *args, **kwargs))
            return Blocking(result) if hasattr(result, "episode_id") and hasattr(result, "finish") else result

        if name == "episode":
            return lambda episode_id: Blocking(value(episode_id))
        if inspect.isgeneratorfunction(value):
            return partial(_iterate, value)
        return call

    async def __aenter__(self) -> Any:
        await anyio.to_thread.run_sync(self._inner.__enter__)
        return self

    async def __aexit__(self, *args: Any) -> None:
        await anyio.to_thread.run_sync(self._inner.__exit__, *args)


async def _iterate(function: Callable[..., Iterator[Any]], *args: Any, **kwargs: Any) -> AsyncIterator[Any]:
    for item in await anyio.to_thread.run_sync(lambda: list(function(*args, **kwargs))):
        yield item


def _blocking(*args: Any, **kwargs: Any) -> Blocking:
    return Blocking(Client(*args, **kwargs))


@pytest.fixture(params=["async", "blocking"])
def make(request: pytest.FixtureRequest) -> Make:
    """Makes a client of either kind, quick to give up."""
    kind = AsyncClient if request.param == "async" else _blocking
    return partial(kind, settings=QUICK)


@pytest.fixture(scope="session")
def door(open_door: OpenDoor) -> Iterator[Door]:
    with open_door() as running:
        yield running


@pytest.fixture(scope="session")
def launching_door(open_door: OpenDoor, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Door]:
    """A server with two tasks, real sandboxes, little room and low ceilings."""
    source = tmp_path_factory.mktemp("tasks") / "tasks.jsonl"
    sums = [{"id": f"sum-{n}", "instruction": f"{n} + 3?", "answer": {"value": str(n + 3)}} for n in (1, 2)]
    source.write_text("".join(json.dumps(task) + "\n" for task in sums))
    bounds = {"max_open": 2, "max_running": 2, "max_turns": 2, "max_completion_tokens": 16}
    with open_door(sandboxes={"kind": "local"}, tasks={"sources": [source]}, episodes=bounds) as running:
        yield running


@pytest.fixture
async def client(make: Make, door: Door) -> AsyncIterator[Any]:
    async with make(door.url, key=door.key) as made:
        yield made
