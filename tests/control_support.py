"""A control door on a real uvicorn server and a free port, in a thread, for tests of the door and the clients."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import anyio
import uvicorn
from starlette.types import ASGIApp

from control_memory import MemoryEngine, MemoryEpisodes
from turnstile_server.control.app import build_control_app
from turnstile_server.control.rest import ControlParts, build_router
from turnstile_server.observability.metrics import Metrics
from turnstile_server.settings import ControlSettings

KEY = "test-control-key-0123456789"


@dataclass
class Door:
    """A running control door. ``call``: runs a function on the server's loop, for what HTTP cannot do."""

    url: str
    key: str
    episodes: MemoryEpisodes
    engine: MemoryEngine
    call: Callable[[Callable[[], Any]], Any] = field(repr=False)

    def add_turn(self, episode_id: str) -> str:
        """Records one turn of the episode and returns its id."""
        turn_id: str = self.call(lambda: self.episodes.add_turn(episode_id))
        return turn_id


class Parts(Protocol):
    episodes: MemoryEpisodes
    engine: MemoryEngine


def door_app(settings: ControlSettings, episodes: MemoryEpisodes, engine: MemoryEngine) -> ASGIApp:
    metrics = Metrics()
    parts = ControlParts(episodes, engine, metrics, settings, anyio.CapacityLimiter(2))
    return build_control_app(
        [build_router(parts)], key=KEY if settings.auth else None, metrics=metrics, settings=settings
    )


def free_socket(port: int = 0) -> socket.socket:
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind(("127.0.0.1", port))
    return listener


@asynccontextmanager
async def serving(app: ASGIApp, listener: socket.socket) -> AsyncIterator[None]:
    config = uvicorn.Config(app, log_config=None, lifespan="off", timeout_graceful_shutdown=1)
    server = uvicorn.Server(config)
    server.install_signal_handlers = lambda: None  # type: ignore[attr-defined]
    task = asyncio.create_task(server.serve(sockets=[listener]))
    while not server.started:
        if task.done():
            await task
        await asyncio.sleep(0.005)
    try:
        yield
    finally:
        server.should_exit = True
        await task


@contextmanager
def running_door(*, port: int = 0, max_open: int = 100, **settings: Any) -> Iterator[Door]:
    """A door in a thread of its own; ``settings`` are ControlSettings."""
    ready, stop, found = threading.Event(), asyncio.Event(), {}
    listener = free_socket(port)

    async def main() -> None:
        loop = asyncio.get_running_loop()

        def call(function: Callable[[], Any]) -> Any:
            async def run() -> Any:
                return function()

            return asyncio.run_coroutine_threadsafe(run(), loop).result(10)

        episodes, engine = MemoryEpisodes(max_open=max_open), MemoryEngine()
        async with serving(door_app(ControlSettings(**settings), episodes, engine), listener):
            found["loop"] = loop
            found["door"] = Door(f"http://127.0.0.1:{listener.getsockname()[1]}", KEY, episodes, engine, call)
            ready.set()
            await stop.wait()

    thread = threading.Thread(target=lambda: asyncio.run(main()))
    thread.start()
    try:
        assert ready.wait(20)
        yield found["door"]
    finally:
        found["loop"].call_soon_threadsafe(stop.set)
        thread.join()
        listener.close()
