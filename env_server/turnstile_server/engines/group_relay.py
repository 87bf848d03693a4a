"""Joins an engine to the store of a trainer's process group through a socket that we can close.

An SGLang that joins a group waits in its scheduler until the group is complete, up to torch's own 30 minutes, and
serves nothing meanwhile. Nothing in its interface ends that wait; the end of its connection to the store does. So
where the engine is on this machine, or ``engine.group_relay_host`` is set, it is given our address.

asyncio's streams are used here, because the relay outlives the request that makes it and has no task group.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from contextlib import suppress
from typing import Final

import anyio

from turnstile_server.errors import EngineTimeout

POLL_S: Final = 0.1
CHUNK: Final = 1 << 16


class GroupRelay:
    """Listens on ``host`` and passes each connection on to the store at ``address``:``target_port``."""

    def __init__(self, host: str, address: str, target_port: int) -> None:
        self._host = host
        self._target = (address, target_port)
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()

    async def start(self) -> int:
        """The port on which it listens."""
        self._server = await asyncio.start_server(self._join, self._host, 0)
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    def close(self) -> None:
        """Ends all connections; safe to call twice."""
        if self._server is not None:
            self._server.close()
        for writer in self._writers:
            writer.transport.abort()

    async def _join(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            back_reader, back_writer = await asyncio.open_connection(*self._target)
        except OSError:
            self._writers.discard(writer)
            writer.transport.abort()
            return
        self._writers.add(back_writer)
        try:
            await asyncio.gather(_copy(reader, back_writer), _copy(back_reader, writer))
        finally:
            self._writers -= {writer, back_writer}


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while data := await reader.read(CHUNK):
            writer.write(data)
            await writer.drain()
    writer.close()


async def wait_for_store(address: str, port: int, limit_s: float) -> None:
    """Returns when something listens at ``address``:``port``. Raises EngineTimeout after ``limit_s`` seconds."""
    last: OSError | None = None
    with anyio.move_on_after(limit_s):
        while True:
            try:
                stream = await anyio.connect_tcp(address, port)
            except OSError as error:
                last = error
            else:
                await _closed(stream.aclose())
                return
            await anyio.sleep(POLL_S)
    raise EngineTimeout(
        f"Nothing listens at {address}:{port} within engine.group_timeout_s ({limit_s:g} s), where the store of "
        f"the process group should be ({last}). The trainer's rank 0 opens it: start it before or while the "
        "engine joins. The engine was not asked."
    )


async def _closed(closing: Awaitable[None]) -> None:
    with suppress(OSError, anyio.BrokenResourceError):
        await closing
