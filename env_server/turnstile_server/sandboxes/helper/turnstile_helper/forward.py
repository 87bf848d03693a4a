"""Forwards TCP on the sandbox's loopback to the agent endpoint's Unix socket, for clients without Unix sockets.

What must hold: bytes are never interpreted; a slow side stops the other; a close at one end reaches the other
end; an answer arrives even if the endpoint sends it and closes before it has read the whole request.
"""

from __future__ import annotations

import socket

from .loop import Loop

_BUFFER = 256 << 10
_READ = 64 << 10


class Forwarder:
    """Listens on 127.0.0.1:``port`` (0: a free one). At most ``limit`` connections at once; one more is closed."""

    def __init__(self, loop: Loop, port: int, target: str, limit: int) -> None:
        self._loop = loop
        self._target = target
        self._limit = limit
        self._pairs: set[_Pair] = set()
        self._listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._listener.bind(("127.0.0.1", port))
        self._listener.listen(128)
        self._listener.setblocking(False)
        loop.watch(self._listener.fileno(), read=self._accept)

    @property
    def port(self) -> int:
        port: int = self._listener.getsockname()[1]
        return port

    def _accept(self) -> None:
        try:
            inner, _ = self._listener.accept()
        except OSError:
            return  # gone already, or no descriptors: the next event tries again
        if len(self._pairs) >= self._limit:
            inner.close()
            return
        outer = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        # Not blocking: where the endpoint's queue is full, this caller is refused and no other one waits.
        outer.setblocking(False)
        try:
            outer.connect(self._target)
        except OSError:
            inner.close()
            outer.close()
            return
        inner.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._pairs.add(_Pair(self._loop, inner, outer, self._pairs))


class _Half:
    """One direction of a connection. ``from_client``: its source is the client and its sink the endpoint; else the
    other way round. Faults of the client's socket are raised: without a client there is nothing to do. The
    endpoint
    may end at any time, and everything it sent before must still arrive."""

    def __init__(self, source: socket.socket, sink: socket.socket, from_client: bool) -> None:
        self.buffer = bytearray()
        self.ended = False
        self.done = False
        """The end was passed on, or there is no other side any more."""
        self._source = source
        self._sink = sink
        self._from_client = from_client
        self._refused = False
        """The endpoint takes no more. The client's bytes are read all the same: closing a connection with unread
        bytes would lose data on its way to the other side."""

    @property
    def wants_more(self) -> bool:
        return not self.ended and len(self.buffer) < _BUFFER

    def receive(self) -> None:
        try:
            data = self._source.recv(_READ)
        except BlockingIOError:
            return
        except OSError:
            if self._from_client:
                raise
            data = b""
        self.ended = not data
        if not self._refused:
            self.buffer += data

    def pass_on(self) -> None:
        try:
            if self.buffer:
                del self.buffer[: self._sink.send(self.buffer)]
            if self.ended and not self.buffer and not self.done:
                self.done = True
                if not self._refused:
                    self._sink.shutdown(socket.SHUT_WR)
        except BlockingIOError:
            return
        except OSError:
            if not self._from_client:
                raise
            self._refused = True
            self.buffer.clear()
            self.done = self.ended


class _Pair:
    """``inner``: the client's connection; ``outer``: the one to the endpoint that was made for it."""

    def __init__(self, loop: Loop, inner: socket.socket, outer: socket.socket, pairs: set[_Pair]) -> None:
        self._loop = loop
        self._pairs = pairs
        self._sockets = (inner, outer)
        # Each reads from the socket at its own place, and writes to the other.
        self._halves = (_Half(inner, outer, from_client=True), _Half(outer, inner, from_client=False))
        inner.setblocking(False)
        self._watch()

    def _watch(self) -> None:
        for end, half, other in zip(self._sockets, self._halves, self._halves[::-1]):  # noqa: B905 - Python 3.8
            self._loop.watch(
                end.fileno(),
                read=(lambda half=half: self._move(half, reading=True)) if half.wants_more else None,  # type: ignore[misc]
                write=(lambda other=other: self._move(other, reading=False)) if other.buffer else None,  # type: ignore[misc]
            )

    def _move(self, half: _Half, reading: bool) -> None:
        try:
            if reading:
                half.receive()
            half.pass_on()
        except OSError:
            self._close()
            return
        if all(half.done for half in self._halves):
            self._close()
        else:
            self._watch()

    def _close(self) -> None:
        self._pairs.discard(self)
        for end in self._sockets:
            self._loop.watch(end.fileno())
            end.close()
