"""TCP on the sandbox's loopback to the agent door's Unix socket, for clients that know no Unix sockets.

Holds: bytes are never looked at; a slow side stops the other; each end's close reaches the other end.
"""

from __future__ import annotations

import socket

from .loop import Loop

_BUFFER = 256 << 10
_READ = 64 << 10
MAX_CONNECTIONS = 128
"""Two descriptors each: an agent that opens more may not use up those that commands need."""


class Forwarder:
    """Listens on 127.0.0.1:``port`` (0: a free one)."""

    def __init__(self, loop: Loop, port: int, target: str) -> None:
        self._loop = loop
        self._target = target
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
        if len(self._pairs) >= MAX_CONNECTIONS:
            inner.close()
            return
        outer = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        # Not blocking: where the door's queue is full this caller is refused, and nobody else waits for it.
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
    """One direction of a connection."""

    def __init__(self, source: socket.socket, sink: socket.socket) -> None:
        self.source = source
        self.sink = sink
        self.buffer = bytearray()
        self.ended = False
        self.shut = False


class _Pair:
    def __init__(self, loop: Loop, inner: socket.socket, outer: socket.socket, pairs: set[_Pair]) -> None:
        self._loop = loop
        self._pairs = pairs
        self._sockets = (inner, outer)
        self._halves = (_Half(inner, outer), _Half(outer, inner))
        inner.setblocking(False)
        self._watch()

    def _watch(self) -> None:
        for half, other in (self._halves, self._halves[::-1]):
            # ``half`` reads from this socket, ``other`` writes to it.
            read = not half.ended and len(half.buffer) < _BUFFER
            self._loop.watch(
                half.source.fileno(),
                read=(lambda half=half: self._move(half, reading=True)) if read else None,  # type: ignore[misc]
                write=(lambda other=other: self._move(other, reading=False)) if other.buffer else None,  # type: ignore[misc]
            )

    def _move(self, half: _Half, reading: bool) -> None:
        try:
            if reading:
                data = half.source.recv(_READ)
                half.buffer += data
                half.ended = not data
            if half.buffer:
                del half.buffer[: half.sink.send(half.buffer)]
            if half.ended and not half.buffer and not half.shut:
                half.shut = True
                half.sink.shutdown(socket.SHUT_WR)
        except BlockingIOError:
            pass
        except OSError:
            self._close()
            return
        if all(half.shut for half in self._halves):
            self._close()
        else:
            self._watch()

    def _close(self) -> None:
        self._pairs.discard(self)
        for end in self._sockets:
            self._loop.watch(end.fileno())
            end.close()
