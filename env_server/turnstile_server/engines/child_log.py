"""The output of an engine's process, as lines of the server's own log, and its last lines for errors.

What must hold: a child is never held up by a full pipe; a line is bounded, and moves no cursor and forges no
record wherever it is shown; the thread that reads ends when the last process that can write has ended.
"""

from __future__ import annotations

import logging
import os
import re
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import anyio
import anyio.to_thread

from turnstile.visible import visible

log = logging.getLogger(__name__)

READ_BYTES: Final = 1 << 16
LINE_BYTES: Final = 8192
"""A longer line is cut in pieces."""

_TERMINAL: Final = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\))")
"""Colours, moves of the cursor and titles (ECMA-48: CSI and OSC)."""
_LINE_END: Final = re.compile(rb"[\r\n]+")
"""Progress bars end their lines with a carriage return."""


class ChildLog:
    """The log of a child called ``name``; ``kept``: how many of its last lines are remembered.

    Children that follow one another may use one, each with ``writing``.
    """

    def __init__(self, name: str, kept: int) -> None:
        self._name = name
        self._lines: deque[str] = deque(maxlen=kept)
        self._readers: list[threading.Thread] = []

    @contextmanager
    def writing(self) -> Iterator[int]:
        """A descriptor for a child's stdout and stderr. It is closed here at the end of the block."""
        reading, writing = os.pipe()
        try:
            reader = threading.Thread(target=self._read, args=(reading,), name=f"{self._name}-log", daemon=True)
            reader.start()
            self._readers.append(reader)
            yield writing
        finally:
            os.close(writing)

    @property
    def last_lines(self) -> list[str]:
        return list(self._lines)

    @property
    def last_line(self) -> str:
        """Empty before the first one."""
        return self._lines[-1] if self._lines else ""

    def tail(self) -> str:
        """The last lines, each on a line of its own, to follow a message."""
        return "".join(f"\n{line}" for line in self._lines)

    async def ended(self, timeout_s: float | None = None) -> bool:
        """Waits until all that children wrote is read. False when one still held its end after ``timeout_s``."""
        readers = list(self._readers)
        until = None if timeout_s is None else time.monotonic() + timeout_s

        def join() -> bool:
            for reader in readers:
                reader.join(None if until is None else max(until - time.monotonic(), 0.0))
            return not any(reader.is_alive() for reader in readers)

        return await anyio.to_thread.run_sync(join)

    def _read(self, descriptor: int) -> None:
        """Runs in a thread."""
        rest = b""
        with os.fdopen(descriptor, "rb", buffering=0) as pipe:
            while data := pipe.read(READ_BYTES):
                *lines, rest = _LINE_END.split(rest + data)
                for line in lines:
                    self._take(line)
                while len(rest) >= LINE_BYTES:
                    self._take(rest[:LINE_BYTES])
                    rest = rest[LINE_BYTES:]
        self._take(rest)

    def _take(self, line: bytes) -> None:
        for start in range(0, len(line), LINE_BYTES):
            text = line[start : start + LINE_BYTES].decode("utf-8", "replace")
            text = visible(_TERMINAL.sub("", text).expandtabs()).rstrip()
            if text:
                self._lines.append(text)
                log.info("%s: %s", self._name, text)
