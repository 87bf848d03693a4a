"""Carries connections to the agent endpoint, and to the server's proxy, over the helper's own connection, where no
socket of the server is mounted.

Listens on 127.0.0.1:``port`` and on a Unix socket inside. Every accepted connection becomes a stream of frames
(``frames.py``), joined at the server's end to the sandbox's listener. What must hold: bytes are never interpreted;
each stream has a window of its own in both directions, so a slow one stops no other and no command; a close at one
end reaches the other end; an answer arrives even if the endpoint sends it and closes before it has read the whole
request.
"""

from __future__ import annotations

import contextlib
import os
import socket
from typing import Any, Callable, Mapping  # noqa: UP035 - Python 3.8

from . import frames
from .loop import Loop
from .outbox import Outbox

_READ = 64 << 10


class Carrier:
    """``port`` 0: a free one. At most ``limit`` connections at once; one more is closed. ``network``: they are for
    the server's proxy, and not for the agent endpoint; the two count their streams apart."""

    def __init__(self, loop: Loop, outbox: Outbox, port: int, path: str, limit: int, network: bool) -> None:
        self._mark = {"net": True} if network else {}
        self._loop = loop
        self._outbox = outbox
        self._limit = limit
        self._carried: dict[int, _Carried] = {}
        self._last = 0
        tcp = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        tcp.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        tcp.bind(("127.0.0.1", port))
        unix = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        unix.bind(path)
        os.chmod(path, 0o666)  # every user inside may connect, as on the port
        self.port: int = tcp.getsockname()[1]
        for listener in (tcp, unix):
            listener.listen(128)
            listener.setblocking(False)
            loop.watch(listener.fileno(), read=lambda listener=listener: self._accept(listener))  # type: ignore[misc]

    def take(self, header: Mapping[str, Any], payload: bytes) -> None:
        """One frame of the server's. A connection that has ended here meanwhile has no use for it."""
        carried = self._carried.get(header["conn"])
        if carried is not None:
            carried.take(header, payload)

    def _accept(self, listener: socket.socket) -> None:
        try:
            client, _ = listener.accept()
        except OSError:
            return  # gone already, or no descriptors: the next event tries again
        if len(self._carried) >= self._limit:
            client.close()
            return
        client.setblocking(False)
        if client.family == socket.AF_INET:
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._last += 1
        number = self._last
        name = {"conn": number, **self._mark}
        self._outbox.send({**name, "do": "open"})
        self._carried[number] = _Carried(
            self._loop, self._outbox, name, client, lambda: self._carried.pop(number, None)
        )


class _Carried:
    """One connection. It is over when both sides have ended, or one has cut it."""

    def __init__(
        self,
        loop: Loop,
        outbox: Outbox,
        name: Mapping[str, Any],
        client: socket.socket,
        on_close: Callable[[], object],
    ) -> None:
        self._loop = loop
        self._outbox = outbox
        self._name = name
        self._client = client
        self._on_close = on_close
        self._credit = frames.CARRY_WINDOW
        """Bytes that the server still takes."""
        self._buffer = bytearray()
        """The server's bytes that the client has not taken yet: a window of them at most."""
        self._taken = 0
        """Bytes that the client took and the server was not told of."""
        self._client_ended = self._server_ended = self._shut = self._closed = False
        self._waiting_for_room = False
        self._watch()

    def take(self, header: Mapping[str, Any], payload: bytes) -> None:
        do = header["do"]
        if do == "data":
            self._buffer += payload
            self._write()
        elif do == "took":
            self._credit += header["n"]
            self._watch()
        elif do == "end":
            self._server_ended = True
            self._write()
        elif do == "cut":
            self._close()

    def _watch(self) -> None:
        if self._closed:
            return
        reads = not self._client_ended and self._credit > 0 and not self._waiting_for_room
        self._loop.watch(
            self._client.fileno(),
            read=self._read if reads else None,
            write=self._write if self._buffer else None,
        )

    def _read(self) -> None:
        if self._outbox.full:
            self._waiting_for_room = True
            self._outbox.when_room(self._room)
            self._watch()
            return
        try:
            data = self._client.recv(min(_READ, self._credit))
        except BlockingIOError:
            return
        except OSError:
            self._cut()
            return
        if data:
            self._credit -= len(data)
            self._outbox.send({**self._name, "do": "data"}, data)
        else:
            self._client_ended = True
            self._outbox.send({**self._name, "do": "end"})
        self._watch_or_finish()

    def _room(self) -> None:
        self._waiting_for_room = False
        self._watch()

    def _write(self) -> None:
        if self._closed:
            return
        try:
            while self._buffer:
                written = self._client.send(self._buffer)
                del self._buffer[:written]
                self._taken += written
        except BlockingIOError:
            pass
        except OSError:
            self._cut()
            return
        if self._taken >= frames.CARRY_WINDOW // 4:
            self._outbox.send({**self._name, "do": "took", "n": self._taken})
            self._taken = 0
        if self._server_ended and not self._buffer and not self._shut:
            self._shut = True
            with contextlib.suppress(OSError):  # the client is gone
                self._client.shutdown(socket.SHUT_WR)
        self._watch_or_finish()

    def _watch_or_finish(self) -> None:
        if self._client_ended and self._shut:
            self._close()
        else:
            self._watch()

    def _cut(self) -> None:
        """The client is gone: nothing of what it asked for is wanted."""
        self._outbox.send({**self._name, "do": "cut"})
        self._close()

    def _close(self) -> None:
        if not self._closed:
            self._closed = True
            self._loop.watch(self._client.fileno())
            self._client.close()
            self._on_close()
