"""A proxy for one of the server's links, which can spoil what goes over it.

Owns the listener and the connections. A spoil is asked for and takes effect at the next bytes that go the asked
way; the caller learns whether it did. Connections whose bytes were changed (``twice``) are remembered by the
client's port, because what their client read proves nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Literal

Kind = Literal["cut", "torn", "twice", "stall", "trickle", "half_close"]
Way = Literal["up", "down"]
KINDS: tuple[Kind, ...] = ("cut", "torn", "twice", "stall", "trickle", "half_close")
PIECE = 1 << 16
SKIPS = (0, 0, 1, 3, 10)
STALL_S = (0.5, 3.0)
TRICKLE_BYTES, TRICKLE_PAUSE_S = 400, 0.002

Dial = Callable[[], Awaitable[tuple[asyncio.StreamReader, asyncio.StreamWriter]]]


def to_tcp(port: int) -> Dial:
    return lambda: asyncio.open_connection("127.0.0.1", port)


def to_unix(path: str) -> Dial:
    return lambda: asyncio.open_unix_connection(path)


@dataclass(eq=False)
class Spoil:
    """``way``: up is from the one who dialled. ``skip``: so many pieces of that way pass first.

    ``effect``: done with True when bytes were spoiled."""

    kind: Kind
    way: Way
    skip: int
    effect: asyncio.Future[bool]


@dataclass(eq=False)
class Link:
    """One connection through the proxy."""

    writers: tuple[asyncio.StreamWriter, asyncio.StreamWriter]
    port: int

    def abort(self) -> None:
        """Both ends see a reset where there is TCP."""
        for writer in self.writers:
            sock = writer.get_extra_info("socket")
            if sock is not None and sock.family == socket.AF_INET:
                with contextlib.suppress(OSError):
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
            writer.transport.abort()


class Wire:
    """``refusing``: new connections are closed at once. ``changed``: (client's port, monotonic time) of
    connections whose bytes were changed. ``spoiled_at``, ``refused_at``: monotonic time of the latest spoil and of
    the latest connection that was closed at once."""

    def __init__(self, name: str, dial: Dial, chance: random.Random) -> None:
        self.name = name
        self.changed: list[tuple[int, float]] = []
        self.refusing = False
        self.refused = 0
        self.refused_at = 0.0
        self.spoiled_at = 0.0
        self._dial = dial
        self._random = chance
        self._links: set[Link] = set()
        self._spoils: list[Spoil] = []
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def listen_tcp(self, port: int = 0) -> int:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", port)
        bound: int = self._server.sockets[0].getsockname()[1]
        return bound

    async def listen_unix(self, path: str) -> None:
        self._server = await asyncio.start_unix_server(self._serve, path)

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        for link in list(self._links):
            link.abort()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def spoil(self, kind: Kind, way: Way, patience_s: float, skip: int | None = None) -> bool:
        """Spoils whatever goes that way soon; whether bytes were spoiled in time."""
        skip = self._random.choice(SKIPS) if skip is None else skip
        spoil = Spoil(kind, way, skip, asyncio.get_running_loop().create_future())
        self._spoils.append(spoil)
        try:
            return await asyncio.wait_for(asyncio.shield(spoil.effect), patience_s)
        except TimeoutError:
            if spoil in self._spoils:
                self._spoils.remove(spoil)
            return spoil.effect.done()
        finally:
            spoil.effect.cancel()

    def cut_all(self) -> int:
        """Resets every connection; how many there were."""
        links = list(self._links)
        for link in links:
            link.abort()
        return len(links)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            if self.refusing:
                self.refused += 1
                self.refused_at = time.monotonic()
                writer.transport.abort()
                return
            try:
                far_reader, far_writer = await self._dial()
            except OSError:
                writer.transport.abort()
                return
            peer = writer.get_extra_info("peername")
            link = Link((writer, far_writer), peer[1] if isinstance(peer, tuple) else 0)
            self._links.add(link)
            try:
                async with asyncio.TaskGroup() as group:
                    group.create_task(self._pump(link, reader, far_writer, "up"))
                    group.create_task(self._pump(link, far_reader, writer, "down"))
            finally:
                self._links.discard(link)
                for each in link.writers:
                    each.transport.abort() if each.is_closing() else each.close()
        except* (OSError, asyncio.CancelledError):
            writer.transport.abort()
        finally:
            self._tasks.discard(task)

    async def _pump(
        self, link: Link, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, way: Way
    ) -> None:
        while data := await reader.read(PIECE):
            spoil = self._due(way)
            if spoil is None:
                writer.write(data)
            else:
                self.spoiled_at = time.monotonic()
                if not spoil.effect.done():
                    spoil.effect.set_result(True)
                if not await self._spoiled(link, writer, data, spoil.kind):
                    return
            await writer.drain()
        if writer.can_write_eof() and not writer.is_closing():
            writer.write_eof()

    def _due(self, way: Way) -> Spoil | None:
        """The spoil for the piece that comes now."""
        for spoil in self._spoils:
            if spoil.way == way:
                spoil.skip -= 1
                if spoil.skip < 0:
                    self._spoils.remove(spoil)
                    return spoil
        return None

    async def _spoiled(self, link: Link, writer: asyncio.StreamWriter, data: bytes, kind: Kind) -> bool:
        """Whether the connection goes on."""
        chance = self._random
        if kind == "stall":
            await asyncio.sleep(chance.uniform(*STALL_S))
            writer.write(data)
            return True
        if kind == "trickle":
            for at in range(min(TRICKLE_BYTES, len(data))):
                if writer.is_closing():
                    return False
                writer.write(data[at : at + 1])
                await asyncio.sleep(TRICKLE_PAUSE_S)
            writer.write(data[TRICKLE_BYTES:])
            return True
        if kind == "twice":
            start = chance.choice((0, chance.randrange(len(data))))
            end = chance.choice((len(data), chance.randint(start + 1, len(data))))
            self.changed.append((link.port, time.monotonic()))
            writer.write(data[:end] + data[start:end] + data[end:])
            return True
        if kind == "torn":
            writer.write(data[: chance.randrange(len(data))])
            with contextlib.suppress(OSError):
                await writer.drain()
            await asyncio.sleep(0.01)
        if kind == "half_close":
            writer.write(data[: chance.randint(1, len(data))])
            if writer.can_write_eof():
                writer.write_eof()
            await asyncio.sleep(1.0)
        link.abort()
        return False
