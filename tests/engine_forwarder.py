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

CHUNK = 1 << 16
MOST_HELD = 1 << 20


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
    """Both ways at once: whoever only sent or only read would wait for one that waits for it."""
    other = {client: engine, engine: client}
    to_send = {client: bytearray(), engine: bytearray()}
    reading, ending = {client, engine}, set[socket.socket]()
    for each in other:
        each.setblocking(False)
    while reading or any(to_send.values()):
        for source in _readable(reading, to_send, other):
            if source is engine:
                time.sleep(delay_s)
            try:
                data = source.recv(CHUNK)
            except (BlockingIOError, ssl.SSLWantReadError):
                continue
            to_send[other[source]] += data
            if not data:
                reading.discard(source)
                ending.add(other[source])
        for target, held in to_send.items():
            with contextlib.suppress(BlockingIOError, ssl.SSLWantWriteError, ssl.SSLWantReadError):
                while held:
                    del held[: target.send(held[:CHUNK])]
        for target in [each for each in ending if not to_send[each]]:
            ending.discard(target)
            target.shutdown(socket.SHUT_WR)


def _readable(
    reading: set[socket.socket],
    to_send: dict[socket.socket, bytearray],
    other: dict[socket.socket, socket.socket],
) -> list[socket.socket]:
    """Those of ``reading`` that have something and whose other end is not behind; waits until one has, or can
    take, some."""
    with selectors.DefaultSelector() as both:
        for each in other:
            reads = each in reading and len(to_send[other[each]]) < MOST_HELD
            if events := selectors.EVENT_READ * reads | selectors.EVENT_WRITE * bool(to_send[each]):
                both.register(each, events)
        held = [each for each in reading if isinstance(each, ssl.SSLSocket) and each.pending()]
        events_of = {key.fd: events for key, events in both.select(0 if held else None)}
    found = [each for each in reading if events_of.get(each.fileno(), 0) & selectors.EVENT_READ]
    return found + [each for each in held if each not in found]


@contextlib.contextmanager
def engine_over_tcp(docker_host: str, tls: ssl.SSLContext | None = None) -> Iterator[EngineForwarder]:
    """``docker_host``: the engine's own address, ``unix://…``."""
    forwarder = EngineForwarder(urlsplit(docker_host).path, tls=tls)
    forwarder.open()
    try:
        yield forwarder
    finally:
        forwarder.cut()
