"""The state of the connection to a mounted server, and the bound on how much the server may send.

``ServerLink`` belongs to one connection: it notes why the connection ended, keeps the last lines of the server's
standard error, and counts what the server sends without being asked. A server that sends more than its share is
cut off: no flood costs more memory than one message, or more time than ten seconds of reading.
"""

from __future__ import annotations

import time
from collections import deque

import anyio

from turnstile_server.own_tools.bounds import OwnToolBounds
from turnstile_server.settings import ToolSettings

WINDOW_S = 10.0
"""Notifications and garbage are counted in windows of this length."""

STDERR_LINES = 12
LINE_CHARS = 300


class Flooded(Exception):
    """The server sent more than it may; the text says what."""


class ServerLink:
    def __init__(self, settings: ToolSettings) -> None:
        self._bounds = settings.bounds_of(OwnToolBounds)
        self.lost = anyio.Event()
        """Set when the connection is of no use any more."""
        self.ending = False
        """The connection is being closed from this side, so that the server's end says nothing."""
        self._reason: str | None = None
        self._lines: deque[str] = deque(maxlen=STDERR_LINES)
        self._open: set[str | int | None] = set()
        """Requests without an answer; those that were cancelled stay, a number each."""
        self._window_began = 0.0
        self._notifications = 0
        self._garbage = 0

    def lose(self, reason: str) -> None:
        """The first reason stands."""
        if self._reason is None:
            self._reason = reason
        self.lost.set()

    def stderr_line(self, line: str) -> None:
        if line.strip():
            self._lines.append(line.rstrip()[:LINE_CHARS])

    def asked(self, request_id: str | int) -> None:
        self._open.add(request_id)

    def answered(self, request_id: str | int | None) -> bool:
        """True if the message is the reply to a pending request."""
        known = request_id in self._open
        self._open.discard(request_id)
        return known

    def notified(self) -> None:
        """Counts a notification, or a request of the server's own. Raises Flooded."""
        self._renew()
        self._notifications += 1
        most = self._bounds.mount_max_notifications
        if self._notifications > most:
            raise Flooded(f"it sent more than {most} notifications in {WINDOW_S:g} s")

    def discarded(self, size: int) -> None:
        """Counts bytes that were read for nothing. Raises Flooded."""
        self._renew()
        self._garbage += size
        most = self._bounds.mount_max_garbage_bytes
        if self._garbage > most:
            raise Flooded(
                f"it sent more than {most} bytes in {WINDOW_S:g} s that are no messages, or too large ones"
            )

    def _renew(self) -> None:
        now = time.monotonic()
        if now - self._window_began > WINDOW_S:
            self._window_began, self._notifications, self._garbage = now, 0, 0

    def why(self) -> str:
        """The reason that the connection ended, with the last lines of the server's standard error."""
        said = self._reason or "the connection was closed"
        return said if not self._lines else f"{said}; the last of its standard error:\n" + "\n".join(self._lines)
