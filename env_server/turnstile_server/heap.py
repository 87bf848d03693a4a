"""Gives freed memory back to the system. glibc keeps what lies below anything that is still in use, for later.

Other C libraries (musl, macOS) have no such call, and there is nothing to do.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable


class Heap:
    """The C library's heap of this process."""

    def __init__(self) -> None:
        self._trim = _glibc_trim()

    @property
    def trims(self) -> bool:
        """True if the C library can give memory back."""
        return self._trim is not None

    def trim(self) -> None:
        """Gives back what it can: some tens of milliseconds, for a thread. The interpreter's lock is free
        meanwhile; other threads that allocate more than 512 bytes wait."""
        if self._trim is not None:
            self._trim(0)


def _glibc_trim() -> Callable[[int], int] | None:
    try:
        found = ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError, TypeError):  # another C library, or none that is linked dynamically
        return None
    found.argtypes, found.restype = [ctypes.c_size_t], ctypes.c_int
    trim: Callable[[int], int] = found
    return trim
