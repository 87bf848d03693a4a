"""Frames on their way to the server. What must hold: a producer without end waits while too much is queued."""

from __future__ import annotations

import collections
import os
from typing import Any, Callable  # noqa: UP035 - Python 3.8

from . import frames
from .loop import Loop

_HIGH_WATER = 2 << 20


class Outbox:
    """Owns ``fd``, the writing end of the connection, which does not block. ``lost`` is called when the server is
    gone. ``seal``: makes of what is sent what is written."""

    def __init__(
        self, loop: Loop, fd: int, lost: Callable[[], None], seal: Callable[[bytes], bytes] | None = None
    ) -> None:
        self._loop = loop
        self._fd = fd
        self._lost = lost
        self._seal = seal
        self._queue: collections.deque[memoryview] = collections.deque()
        self._size = 0
        self._waiting: list[Callable[[], None]] = []

    @property
    def full(self) -> bool:
        return self._size > _HIGH_WATER

    def when_room(self, callback: Callable[[], None]) -> None:
        """Calls back once, when ``full`` is over."""
        self._waiting.append(callback)

    def send(self, header: dict[str, Any], payload: bytes | memoryview = b"") -> None:
        frame = frames.encode(header, payload)
        if self._seal is not None:
            frame = self._seal(frame)
        self._queue.append(memoryview(frame))
        self._size += len(frame)
        self._flush()

    def send_long(self, header: dict[str, Any], payload: bytes | bytearray) -> None:
        view = memoryview(bytes(payload))
        for start in range(0, len(view), frames.CHUNK):
            self.send(header, view[start : start + frames.CHUNK])

    def _flush(self) -> None:
        try:
            while self._queue:
                written = os.write(self._fd, self._queue[0])
                self._size -= written
                if written < len(self._queue[0]):
                    self._queue[0] = self._queue[0][written:]
                else:
                    self._queue.popleft()
        except BlockingIOError:
            pass
        except OSError:
            self._lost()
            return
        self._loop.watch(self._fd, write=self._flush if self._queue else None)
        if self._waiting and not self.full:
            waiting, self._waiting = self._waiting, []
            for callback in waiting:
                callback()
