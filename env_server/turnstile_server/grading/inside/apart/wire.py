"""The wire between the two sandboxes of one judgement: frames over standard input and output.

The server hands on what comes. A frame is the lengths of its header and of its payload (two big-endian uint32),
the header (a JSON object with the word ``do``) and the payload. ``n`` is the number of a launched program. From
the check's side::

    config                  the first frame, the server's own: see ``check_side``
    launch n argv cwd env timeout_s stdin joined    start a program; ``stdin`` is "file", "stream" or "none";
                            ``joined``: its standard error is its standard output
    data n s=0 + bytes      its standard input; ``end n s=0``: no more
    kill n                  kill it
    sweep n                 kill every process of the work's user

and from the work's side::

    data n s=1|2 + bytes    its standard output and error
    ended n exit_code timed_out consumed error    it has ended; ``consumed``: bytes that it read of a "file"

Both send changes of folders (``folders.Change``), ended by ``changed``, before ``launch`` and ``ended``; and
``took s n size`` when payloads were passed on: of each stream at most ``WINDOW`` bytes are under way. Changes are
the stream 0 of the program 0.
"""

from __future__ import annotations

import json
import os
import struct
import threading
from collections.abc import Iterator, Mapping
from typing import Any

CHUNK = 128 << 10
WINDOW = 1 << 20
FILES = (0, 0)
"""The stream of changed files: a program's number, and its stream."""
MOST_HEADER, MOST_PAYLOAD = 8 << 20, 1 << 20
_ENOUGH = 1 << 62
_LENGTHS = struct.Struct("!II")


class WireBroken(Exception):
    """The other side is gone, or sends what is no frame."""


class Wire:
    """One end. Frames may be sent by any thread, and are read by one."""

    def __init__(self, reading: int, writing: int) -> None:
        self._reading = os.fdopen(reading, "rb", buffering=CHUNK)
        self._writing = writing
        self._lock = threading.Lock()
        self._credits: dict[tuple[int, int], _Credit] = {}
        self._credits_lock = threading.Lock()
        self._broken = False

    def send(self, do: str, payload: bytes = b"", **fields: Any) -> None:
        """Raises WireBroken."""
        header = json.dumps({"do": do, **fields}).encode()
        left = memoryview(_LENGTHS.pack(len(header), len(payload)) + header + payload)
        with self._lock:
            try:
                while left:
                    left = left[os.write(self._writing, left) :]
            except OSError as error:
                raise WireBroken(f"the other sandbox is gone: {error.strerror}") from None

    def send_paid(self, stream: tuple[int, int], do: str, payload: bytes, **fields: Any) -> None:
        """The same, when the stream has room for the payload. Raises WireBroken."""
        self._credit(stream).take(len(payload))
        self.send(do, payload, **fields)

    def frames(self) -> Iterator[tuple[Mapping[str, Any], bytes]]:
        """What comes, but ``took``, to the end of the wire. Raises WireBroken for what is no frame."""
        while lengths := self._reading.read(_LENGTHS.size):
            if len(lengths) < _LENGTHS.size:
                raise WireBroken("it ended within a frame")
            head, body = _LENGTHS.unpack(lengths)
            if head > MOST_HEADER or body > MOST_PAYLOAD:
                raise WireBroken("a frame is too large")
            text, payload = self._reading.read(head), self._reading.read(body)
            if len(text) < head or len(payload) < body:
                raise WireBroken("it ended within a frame")
            try:
                header = json.loads(text)
                if header["do"] == "took":
                    self._credit((int(header["n"]), int(header["s"]))).give(int(header["size"]))
                    continue
            except (ValueError, TypeError, KeyError, RecursionError):
                raise WireBroken("a header is not one") from None
            yield header, payload

    def took(self, stream: tuple[int, int], size: int) -> None:
        """Bytes of it were passed on. Raises WireBroken."""
        self.send("took", n=stream[0], s=stream[1], size=size)

    def let_go(self, number: int) -> None:
        """A program has ended: whoever waits to send to it, or for it, waits no longer."""
        for stream in range(3):
            self._credit((number, stream)).give(_ENOUGH)

    def forget(self, number: int) -> None:
        """Nobody sends anything of that program any more."""
        with self._credits_lock:
            for stream in range(3):
                self._credits.pop((number, stream), None)

    def breaks(self) -> None:
        """Nothing is sent any more: whoever waits is let go."""
        self._broken = True
        with self._credits_lock:
            credits = list(self._credits.values())
        for credit in credits:
            credit.give(_ENOUGH)

    def _credit(self, stream: tuple[int, int]) -> _Credit:
        with self._credits_lock:
            credit = self._credits.setdefault(stream, _Credit())
            if self._broken:
                credit.give(_ENOUGH)
            return credit


class _Credit:
    """The bytes of a stream that may still be sent."""

    def __init__(self) -> None:
        self._left = WINDOW
        self._changed = threading.Condition()

    def take(self, size: int) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._left >= size)
            self._left -= size

    def give(self, size: int) -> None:
        with self._changed:
            self._left += size
            self._changed.notify_all()


def standard_wire() -> Wire:
    """Standard input and output as the wire. They lead elsewhere then: no stray word gets among the frames."""
    wire = Wire(os.dup(0), os.dup(1))
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.close(null)
    os.dup2(2, 1)
    return wire
