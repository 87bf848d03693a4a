"""The tokens of one path in one piece, with room behind them for those of the next turn.

An engine is fed the whole path each turn. Made anew each time, that is a copy of half a megabyte at 128k tokens;
here only the turn's own tokens are written. What must hold: what was written never changes, because views of it
were handed out. So other tokens at the same place (a sibling's) get a buffer of their own.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np

from turnstile.models import Int32Array

_LEAST_ROOM = 1024
_ROOM_SHARE = 8
"""A buffer is an eighth longer than what it is made for, so that all copies of a growing path together cost a
small multiple of its length."""


class PathBuffer:
    """``parts``: what it begins with, int32 each. Used by the event loop and by the threads of exports."""

    def __init__(self, parts: Sequence[Int32Array]) -> None:
        size = sum(map(len, parts))
        self._ids = np.empty(size + max(size // _ROOM_SHARE, _LEAST_ROOM), np.int32)
        if size:
            np.concatenate(parts, out=self._ids[:size])
        self._used = size
        self._lock = threading.Lock()

    def first(self, count: int) -> Int32Array:
        """int32[count], read-only: the first of the tokens, which were written before."""
        found = self._ids[:count]
        found.flags.writeable = False
        return found

    def extended(self, start: int, parts: Sequence[Int32Array]) -> Int32Array | None:
        """int32[start + sizes of ``parts``], read-only: the first ``start`` tokens, which were written before,
        then ``parts``. None where others than these were written behind ``start``, or where there is no room."""
        with self._lock:
            end = start
            for part in parts:
                written = min(self._used - end, len(part))
                if written and not np.array_equal(self._ids[end : end + written], part[:written]):
                    return None
                if end + len(part) > len(self._ids):
                    return None
                self._ids[end + written : end + len(part)] = part[written:]
                end += len(part)
                self._used = max(self._used, end)
        return self.first(end)
