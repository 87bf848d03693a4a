"""A TCP address of the Docker engine's socket, for tests: what `tcp://` in DOCKER_HOST reaches.

It lives in a thread of the test, and can be cut and opened again, like an engine that dies and comes back.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from urllib.parse import urlsplit


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
        self._open: set[socket.socket] = set()
        self._lock = threading.Lock()

    @property
    def url(self) -> str:
        return f"tcp://127.0.0.1:{self.port}"

    def serve(self) -> None:
        """Until ``cut``."""
        listener = self._listener
        with contextlib.suppress(OSError):
            while True:
                client, _ = listener.accept()
                threading.Thread(target=self._carry, args=(client,), daemon=True).start()

    def cut(self) -> None:
        """Refuses connections and ends those that are open."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        with self._lock:
            for each in self._open:
                with contextlib.suppress(OSError):
                    each.shutdown(socket.SHUT_RDWR)

    def open(self) -> None:
        """Serves in a thread; after ``cut`` at the same port."""
        if self._listener.fileno() < 0:
            self._listener = socket.create_server((self._host, self.port))
        threading.Thread(target=self.serve, daemon=True).start()

    def _carry(self, client: socket.socket) -> None:
        engine = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        with client, engine:
            with self._lock:
                self._open |= {client, engine}
            try:
                engine.connect(self._engine)
                if self._tls is None:
                    _pump(client, engine, self.delay_s)
                else:
                    with self._tls.wrap_socket(client, server_side=True) as secured:
                        _pump(secured, engine, self.delay_s)
            except OSError:
                return  # one of them is gone, and with it the other
            finally:
                with self._lock:
                    self._open -= {client, engine}


def _pump(client: socket.socket, engine: socket.socket, delay_s: float) -> None:
    other = {client: engine, engine: client}
    with selectors.DefaultSelector() as both:
        for each in other:
            both.register(each, selectors.EVENT_READ)
        while both.get_map():
            for key, _ in both.select():
                source = key.fileobj
                assert isinstance(source, socket.socket)
                if source is engine:
                    time.sleep(delay_s)
                data = source.recv(1 << 16)
                while isinstance(source, ssl.SSLSocket) and source.pending():
                    data += source.recv(source.pending())
                if data:
                    other[source].sendall(data)
                else:
                    both.unregister(source)
                    other[source].shutdown(socket.SHUT_WR)


@contextlib.contextmanager
def engine_over_tcp(docker_host: str, tls: ssl.SSLContext | None = None) -> Iterator[EngineForwarder]:
    """``docker_host``: the engine's own address, ``unix://…``."""
    forwarder = EngineForwarder(urlsplit(docker_host).path, tls=tls)
    forwarder.open()
    try:
        yield forwarder
    finally:
        forwarder.cut()
