"""Two ways to handle a child's output: keep it up to a bound, or pass it on as it comes."""

from __future__ import annotations

import re
from typing import Protocol

from . import frames
from .outbox import Outbox

_LINE_ENDS = re.compile(rb"[\r\n]+")
"""A progress bar overwrites its line with carriage returns."""


class Output(Protocol):
    def take(self, data: bytes) -> None: ...

    @property
    def full(self) -> bool:
        """True if reading has to pause."""
        ...

    def latest_line(self) -> bytes:
        """The last line that is not blank, whole or not; of a long one the last ``MAX_LINE`` bytes."""
        ...

    def finish(self) -> int:
        """Sends the kept output; returns the number of bytes that were left out."""
        ...


class CutOutput:
    """The first and the last half of ``bound`` bytes."""

    def __init__(self, outbox: Outbox, request: int, stream: int, bound: int) -> None:
        self._outbox = outbox
        self._header = {"id": request, "ev": "out", "stream": stream}
        self._head_size = bound - bound // 2
        self._tail_size = bound // 2
        self._head = bytearray()
        self._tail = bytearray()
        self._dropped = 0

    full = False

    def take(self, data: bytes) -> None:
        room = self._head_size - len(self._head)
        if room > 0:
            self._head += data[:room]
            data = data[room:]
        self._tail += data
        # Cut only now and then: each cut moves the whole tail.
        if len(self._tail) > 2 * self._tail_size + frames.CHUNK:
            self._cut()

    def _cut(self) -> None:
        excess = len(self._tail) - self._tail_size
        if excess > 0:
            self._dropped += excess
            del self._tail[:excess]

    def latest_line(self) -> bytes:
        most = frames.MAX_LINE
        recent = bytes((self._head[-2 * most :] + self._tail[-2 * most :])[-2 * most :])
        lines = [line for line in map(bytes.strip, _LINE_ENDS.split(recent)) if line]
        return lines[-1][-most:] if lines else b""

    def finish(self) -> int:
        self._cut()
        self._outbox.send_long(self._header, self._head + self._tail)
        return self._dropped


class Passed:
    """Passes output on as it comes."""

    def __init__(self, outbox: Outbox, request: int, stream: int) -> None:
        self._outbox = outbox
        self._header = {"id": request, "ev": "out", "stream": stream}

    @property
    def full(self) -> bool:
        return self._outbox.full

    def take(self, data: bytes) -> None:
        self._outbox.send(self._header, data)

    def latest_line(self) -> bytes:
        return b""

    def finish(self) -> int:
        return 0
