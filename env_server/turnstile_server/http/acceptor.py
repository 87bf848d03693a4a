"""Accepts the connections of a listening socket, also when the process has no descriptors left.

The event loop's own server closes its socket for good when an ``accept`` fails (uvloop 0.23, as with EMFILE), and
accepts whatever comes before anybody is asked. This one asks for a place first, answers 503 where there is none,
and tries again where descriptors are missing. A listener that must go on whatever the others use keeps a few
descriptors in reserve, and gives up one or two of them for each connection that it could not accept otherwise.

It is written on asyncio, whose transports uvicorn's protocols need.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
from collections.abc import Callable

from turnstile_server.http.refusal import refusal
from turnstile_server.shortages import SHORTAGES

_LOG = logging.getLogger(__name__)
_AT_ONCE = 64
"""Connections accepted and not yet served, at most; others wait in the socket's own queue."""
_FEWEST_AT_ONCE = 4
_PAUSE_S = 0.1
_REFILL_S = 1.0
_RELEASED = 2
"""Descriptors given up for a connection: its own, and one that its request may need."""
_BUSY = refusal(503, "too_many_connections", "the server has no room for more connections; try again", retry=True)


class Acceptor:
    """``make``: the protocol of a new connection, None where there is no place. ``places``: how many there are.
    ``reserve``: descriptors kept."""

    def __init__(
        self,
        listening: socket.socket,
        make: Callable[[], asyncio.Protocol | None],
        *,
        places: int,
        reserve: int = 0,
    ) -> None:
        self._listening = listening
        self._make = make
        self._loop = asyncio.get_running_loop()
        # A connection that is not served yet can make way for none, so these are never all places.
        self._at_once = min(_AT_ONCE, max(_FEWEST_AT_ONCE, places // 4))
        self._reserve = reserve
        self._kept: list[int] = []
        self._timers: set[asyncio.TimerHandle] = set()
        self._connecting: set[asyncio.Task[None]] = set()
        self._closed = False

    def start(self) -> None:
        self._listening.setblocking(False)
        self._refill()
        self._loop.add_reader(self._listening.fileno(), self._accept)

    def close(self) -> None:
        """Accepts nothing from now on. The socket is its owner's. May be called twice."""
        if self._closed:
            return
        self._closed = True
        if self._listening.fileno() >= 0:
            self._loop.remove_reader(self._listening.fileno())
        for timer in self._timers:
            timer.cancel()
        while self._kept:
            os.close(self._kept.pop())

    async def wait_closed(self) -> None:
        """Returns when no connection is half made."""
        if self._connecting:
            await asyncio.wait(self._connecting)

    def _accept(self) -> None:
        while len(self._connecting) < self._at_once:
            try:
                connection, _address = self._listening.accept()
            except (BlockingIOError, InterruptedError):
                return
            except OSError as error:
                if error.errno not in SHORTAGES:
                    continue  # this client went away before it was accepted
                if not self._release():
                    self._pause()
                    return
                continue
            self._serve(connection)

    def _serve(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        protocol = self._make()
        if protocol is None:
            _refuse(connection)
            return
        task = self._loop.create_task(self._connect(connection, protocol))
        self._connecting.add(task)
        task.add_done_callback(self._connecting.discard)

    async def _connect(self, connection: socket.socket, protocol: asyncio.Protocol) -> None:
        try:
            await self._loop.connect_accepted_socket(lambda: protocol, connection)
        except OSError as error:
            _LOG.debug("a connection was lost before it was served: %s", error)
            connection.close()
            protocol.connection_lost(error)

    def _release(self) -> bool:
        """Gives up descriptors of the reserve; False where none is left."""
        released = 0
        while self._kept and released < _RELEASED:
            os.close(self._kept.pop())
            released += 1
        if released:
            self._later(_REFILL_S, self._refill)
        return released > 0

    def _refill(self) -> None:
        while len(self._kept) < self._reserve:
            try:
                self._kept.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
            except OSError:
                self._later(_REFILL_S, self._refill)
                return

    def _pause(self) -> None:
        """The socket stays readable while nothing can be accepted, so it is left alone for a moment."""
        self._loop.remove_reader(self._listening.fileno())
        self._later(_PAUSE_S, lambda: self._loop.add_reader(self._listening.fileno(), self._accept))

    def _later(self, delay_s: float, call: Callable[[], object]) -> None:
        def run() -> None:
            self._timers.discard(timer)
            call()

        timer = self._loop.call_later(delay_s, run)
        self._timers.add(timer)


def _refuse(connection: socket.socket) -> None:
    """Says why, as far as that fits into the socket's buffer, and closes."""
    with contextlib.suppress(OSError), connection:
        connection.send(_BUSY)
        connection.shutdown(socket.SHUT_WR)
