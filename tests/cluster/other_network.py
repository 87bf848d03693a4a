"""A server of this process, reached from the network name space of another one."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import socket
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from urllib.parse import urlsplit

CLONE_NEWNET = 0x40000000


@asynccontextmanager
async def bridged(url: str, pid: int, host: str, port: int = 0) -> AsyncIterator[str]:
    """The URL under which the network of process ``pid`` reaches the server at ``url``."""
    target = urlsplit(url)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            other_reader, other_writer = await asyncio.open_connection(target.hostname, target.port)
            await asyncio.gather(pump(reader, other_writer), pump(other_reader, writer))

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while part := await reader.read(1 << 16):
                writer.write(part)
        finally:
            writer.close()

    listener = _listener(pid, host, port)
    async with await asyncio.start_server(serve, sock=listener):
        yield f"http://{host}:{listener.getsockname()[1]}"


def _listener(pid: int, host: str, port: int) -> socket.socket:
    made: list[socket.socket] = []

    def listen() -> None:  # in a thread: it moves to another network for good
        with open(f"/proc/{pid}/ns/net") as network:
            if ctypes.CDLL(None, use_errno=True).setns(network.fileno(), CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), "setns")
        made.append(socket.create_server((host, port)))

    thread = threading.Thread(target=listen)
    thread.start()
    thread.join()
    return made[0]
