"""Memory that the process no longer uses, given back to the system."""

from __future__ import annotations

import ctypes
import gc


def give_back() -> None:
    """Collects what nothing refers to, then hands free pages back. The allocator keeps them otherwise, and the
    process stays as large as it ever was. Without glibc the allocator decides."""
    gc.collect()
    try:
        trim = ctypes.CDLL(None).malloc_trim
    except AttributeError:  # another C library
        return
    trim(0)
