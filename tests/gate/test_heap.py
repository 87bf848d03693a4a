"""Freed memory goes back to the system where the C library can give it back."""

from __future__ import annotations

import platform

from turnstile_server.heap import Heap


def test_glibc_gives_memory_back_and_no_other_library_is_asked_to() -> None:
    heap = Heap()
    assert heap.trims == (platform.libc_ver()[0] == "glibc")
    heap.trim()
