"""A TCP address of the Docker engine's socket, for tests: what `tcp://` in DOCKER_HOST reaches.

It lives in a thread of the test, and can be cut and opened again, like an engine that dies and comes back.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import threading
from collections.abc import Iterator
from urllib.parse import urlsplit

CHUNK = 1 << 16
MORE_S = 0.001
"""What has arrived by then belongs to the same piece."""


class EngineForwarder:
    """``engine``: path of the engine's socket. ``port`` 0: a free one. ``tls``: of a server. Listens; serves after
    ``open``. ``delay_s``: what the engine says waits so long, and comes in one piece."""

    def __init__(
        self, engine: str, host: str = "127.0.0.1", port: int = 0, tls: ssl.SSLContext | None = None
    ) -> None:
        self.delay_s = 0.0
        self._engine = engine
        self._tls = tls
        self._listener = socket.create_server((host, port))
        self._host = host
        self.port: int = self._listener.getsockname()[1]
        self._open: set[asyncio.StreamWriter] = set()
        self._serving: tuple[threading.Thread, asyncio.AbstractEventLoop, asyncio.Event] | None = None

    @property
    def url(self) -> str:
        return f"tcp://127.0.0.1:{self.port}"

    def open(self) -> None:
        """Serves in a thread; after ``cut`` at the same port."""
        if self._listener.fileno() < 0:
            self._listener = socket.create_server((self._host, self.port))
        begun = threading.Event()
        thread = threading.Thread(target=lambda: asyncio.run(self._serve(begun)), daemon=True)
        thread.start()
        assert begun.wait(10)

    def cut(self) -> None:
        """Refuses connections and ends those that are open."""
        assert self._serving is not None
        (thread, loop, end), self._serving = self._serving, None
        loop.call_soon_threadsafe(end.set)
        thread.join()

    async def _serve(self, begun: threading.Event) -> None:
        end = asyncio.Event()
        self._serving = threading.current_thread(), asyncio.get_running_loop(), end
        server = await asyncio.start_server(self._carry, sock=self._listener, ssl=self._tls)
        begun.set()
        await end.wait()
        server.close()
        for each in self._open:
            each.transport.abort()

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._open.add(writer)
        try:
            with contextlib.suppress(OSError):  # one of them is gone, and with it the other
                said, engine = await asyncio.open_unix_connection(self._engine)
                self._open.add(engine)
                try:
                    await asyncio.gather(self._pump(reader, engine, 0.0), self._pump(said, writer, None))
                finally:
                    self._open.discard(engine)
                    engine.close()
        finally:
            self._open.discard(writer)
            writer.close()

    async def _pump(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, delay_s: float | None
    ) -> None:
        """``delay_s`` None: the forwarder's own, as it is then."""
        while data := await reader.read(CHUNK):
            if wait_s := self.delay_s if delay_s is None else delay_s:
                await asyncio.sleep(wait_s)
                with contextlib.suppress(TimeoutError):
                    while more := await asyncio.wait_for(reader.read(CHUNK), MORE_S):
                        data += more
            writer.write(data)
            await writer.drain()
        if writer.can_write_eof():
            writer.write_eof()
        else:
            writer.close()  # TLS has no half of a connection


@contextlib.contextmanager
def engine_over_tcp(docker_host: str, tls: ssl.SSLContext | None = None) -> Iterator[EngineForwarder]:
    """``docker_host``: the engine's own address, ``unix://…``."""
    forwarder = EngineForwarder(urlsplit(docker_host).path, tls=tls)
    forwarder.open()
    try:
        yield forwarder
    finally:
        forwarder.cut()
