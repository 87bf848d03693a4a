"""File operations, each the whole work of a forked child that has become the user it works for.

So the helper's own rights touch no path that an agent made: what a link leads to is reached with the agent's
rights or not at all. Contents come in by stdin and go out by stdout; a refusal is its sentence on stderr and exit
code ``FILE_PROBLEM``.
"""

from __future__ import annotations

import os
import stat
from typing import Callable  # noqa: UP035 - Python 3.8

from . import frames, tars
from .tars import FileRefused

_PART = 64 << 10


def run(action: str, path: str, max_bytes: int, mode: int | None) -> int:
    """``action``: read, write, unpack (a tar below ``path``), pack (the folder ``path``)."""
    work: dict[str, Callable[[], None]] = {
        "read": lambda: _read(path, max_bytes),
        "write": lambda: _write(path, mode),
        "unpack": lambda: tars.unpack(path),
        "pack": lambda: tars.pack(path, max_bytes),
    }
    try:
        if "\0" in path or not path.startswith("/"):
            raise FileRefused("not an absolute path")
        work[action]()
    except FileRefused as problem:
        return _refuse(f"{_shown(path)}: {problem}")
    except (MemoryError, RecursionError, ValueError) as error:
        return _refuse(f"{_shown(path)}: {type(error).__name__}")
    except OSError as error:
        return _refuse(f"{_shown(path)}: {(error.strerror or str(error)).lower()}")
    return 0


def _shown(path: str) -> str:
    return path if len(path) <= 200 else f"{path[:100]}…{path[-100:]}"


def _refuse(sentence: str) -> int:
    os.write(2, sentence.encode(errors="replace")[:4096])
    return frames.FILE_PROBLEM


def _read(path: str, max_bytes: int) -> None:
    # Not blocking: opening a pipe without a writer would wait for ever.
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY)
    _check_regular(os.fstat(fd))
    if os.fstat(fd).st_size > max_bytes:
        raise FileRefused(f"{os.fstat(fd).st_size} bytes are more than the {max_bytes} that may be read")
    done = 0
    while True:
        data = os.read(fd, _PART)
        if not data:
            return
        done += len(data)
        if done > max_bytes:
            raise FileRefused(f"it has more than the {max_bytes} bytes that may be read")
        tars.write_all(1, data)


def _check_regular(status: os.stat_result) -> None:
    if stat.S_ISDIR(status.st_mode):
        raise FileRefused("it is a folder")
    if not stat.S_ISREG(status.st_mode):
        raise FileRefused("it is not a regular file")


def _write(path: str, mode: int | None) -> None:
    """By a new file beside it and a rename, so that no reader sees half of it; in place where the folder may not
    be written to."""
    path = os.path.realpath(path)
    try:
        before = os.stat(path)
        _check_regular(before)
        mode = stat.S_IMODE(before.st_mode) & 0o777 if mode is None else mode
    except FileNotFoundError:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        mode = 0o644 if mode is None else mode
    beside = os.path.join(os.path.dirname(path), f".turnstile-{os.getpid()}")
    try:
        fd = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    except PermissionError:
        fd = os.open(path, os.O_WRONLY | os.O_TRUNC | os.O_NONBLOCK | os.O_NOCTTY)
        _copy_stdin(fd)
        return
    try:
        _copy_stdin(fd)
        os.fchmod(fd, mode)
        os.rename(beside, path)
    except OSError:
        os.unlink(beside)
        raise


def _copy_stdin(fd: int) -> None:
    while True:
        data = os.read(0, _PART)
        if not data:
            return
        tars.write_all(fd, data)
