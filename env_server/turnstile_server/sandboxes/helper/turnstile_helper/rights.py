"""Rights that are taken from every command: capabilities, ways to gain one, and system calls that the filter does
not allow.

It holds for everything that comes of the command: the kernel lets no process take a filter off, or leave
``no_new_privs``.
"""

from __future__ import annotations

from typing import Optional

from .kernel import Kernel


class Rights:
    """``program``: the filter, as the kernel takes it. ``kernel`` None: commands keep what the helper has."""

    def __init__(self, kernel: Optional[Kernel], program: bytes) -> None:  # noqa: UP045 - Python 3.8
        self._kernel = kernel
        self._program = program

    @property
    def held(self) -> bool:
        """True if anything is taken from commands."""
        return self._kernel is not None

    def empty_bounds(self) -> None:
        """In a child that has the helper's capabilities still: afterwards no program can gain one by rights of its
        own file. Raises OSError."""
        if self._kernel is not None:
            self._kernel.empty_bounding_set()

    def give_up(self) -> None:
        """Last, before the child becomes the command. Raises OSError."""
        if self._kernel is not None:
            self._kernel.drop_capabilities()
            self._kernel.filter_calls(self._program)


NO_RIGHTS_TAKEN = Rights(None, b"")
