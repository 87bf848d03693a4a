"""Files of the work as hidden tests in Python read them: what lies there, and nothing to which a link leads.

A link may lead to a descriptor that the process which judges has open (``/proc/self/fd/7``), whatever right the
work has to the file. So what was opened is looked at, not the name: the work can change a name in between.

Python 3.9 or later, standard library only.
"""

from __future__ import annotations

import builtins
import errno
import io
import os
import sys
from collections.abc import Callable
from typing import Any

_PLAIN = frozenset(("_io", "posix"))
"""Modules of the interpreter's own, which it uses to import."""
_DELETED = " (deleted)"
_NAMELESS = os.O_TMPFILE
"""A new file without a name: no link leads to it."""


def read_no_other(folders: tuple[str, ...], own: tuple[str, ...]) -> None:
    """From now on ``open`` of a path below ``folders`` (prefixes, each ends with "/") raises OSError where it
    leads out of them, or to ``own``."""
    plain_open, plain_io_open, plain_os_open = builtins.open, io.open, os.open
    readlink, abspath, fsdecode, close, fspath = os.readlink, os.path.abspath, os.fsdecode, os.close, os.fspath

    nameless: set[int] = set()
    """Descriptors that were new files without a name when they were last opened by ``os.open``."""

    def is_theirs(path: str) -> bool:
        return path.startswith(folders) and not path.startswith(own)

    def checked(path: Any, descriptor: int) -> int:
        found = readlink(f"/proc/self/fd/{descriptor}")
        if is_theirs(f"{found}/") and not found.endswith(_DELETED):
            return descriptor
        close(descriptor)
        raise OSError(errno.ELOOP, "it leads out of the work's folders", path)

    def is_asked(file: Any) -> bool:
        return not isinstance(file, int) and is_theirs(abspath(fsdecode(file)) + "/")

    def path_of(file: Any) -> Any:
        """Once: an object of the work that is a path could be another one the next time."""
        return file if isinstance(file, int) else fspath(file)

    def os_open(path: Any, flags: int, mode: int = 0o777, *, dir_fd: Any = None) -> int:
        path = path_of(path)
        descriptor = plain_os_open(path, flags, mode, dir_fd=dir_fd)
        if flags & _NAMELESS == _NAMELESS:
            nameless.add(descriptor)
            return descriptor
        nameless.discard(descriptor)
        return checked(path, descriptor) if dir_fd is None and is_asked(path) else descriptor

    def guarded(plain: Callable[..., Any]) -> Callable[..., Any]:
        def open(
            file: Any,
            mode: str = "r",
            buffering: int = -1,
            encoding: Any = None,
            errors: Any = None,
            newline: Any = None,
            closefd: bool = True,
            opener: Any = None,
        ) -> Any:
            file = path_of(file)
            if is_asked(file):

                def look(path: Any, flags: int) -> int:
                    descriptor = (opener or make)(path, flags)
                    if descriptor in nameless:
                        nameless.discard(descriptor)
                        return descriptor
                    return checked(path, descriptor)

                return plain(file, mode, buffering, encoding, errors, newline, closefd, look)
            return plain(file, mode, buffering, encoding, errors, newline, closefd, opener)

        return open

    def make(path: Any, flags: int) -> int:
        descriptor = plain_os_open(path, flags, 0o666)
        nameless.discard(descriptor)
        return descriptor

    checking = {
        id(plain_open): guarded(plain_open),
        id(plain_io_open): guarded(plain_io_open),
        id(plain_os_open): os_open,
    }
    for module in list(sys.modules.values()):  # tarfile and bz2 keep it by names of their own
        if module.__name__ not in _PLAIN:
            for name, value in list(vars(module).items()):
                if id(value) in checking:
                    setattr(module, name, checking[id(value)])
