"""The file operations of a journal, behind one seam so that tests can make any of them fail; the directory lock.

Nothing here knows what the bytes mean.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from turnstile_server.errors import StartupError

logger = logging.getLogger(__name__)

LOCK_NAME = "lock"
_HOLDER_BYTES = 512


class FileOps(Protocol):
    """Any call may raise OSError after any part of its effect has happened."""

    def create(self, path: Path) -> int:
        """Opens a new file for reading and writing; FileExistsError when it is there."""
        ...

    def reopen(self, path: Path) -> int:
        """Opens an existing file for reading and writing."""
        ...

    def write(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        """Writes at ``offset`` (pwritev) and returns how many bytes were taken, perhaps fewer than given."""
        ...

    def sync(self, fd: int) -> None:
        """Data and size of the file are on stable storage (fdatasync)."""
        ...

    def truncate(self, fd: int, size: int) -> None: ...

    def removed(self, fd: int) -> bool:
        """True if the open file has no name any more: what is written to it is lost when it is closed."""
        ...

    def close(self, fd: int) -> None: ...

    def remove(self, path: Path) -> None: ...

    def rename(self, path: Path, target: Path) -> None:
        """``target`` is replaced in one step."""
        ...

    def sync_directory(self, directory: Path) -> None:
        """Names created or removed in ``directory`` are on stable storage."""
        ...

    def free_bytes(self, directory: Path) -> int:
        """Bytes that an unprivileged process may still write."""
        ...

    def total_bytes(self, directory: Path) -> int:
        """Size of the file system."""
        ...


class RealFiles:
    """FileOps on the operating system (Linux)."""

    def create(self, path: Path) -> int:
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)

    def reopen(self, path: Path) -> int:
        return os.open(path, os.O_RDWR)

    def write(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        return os.pwritev(fd, buffers, offset)

    def sync(self, fd: int) -> None:
        os.fdatasync(fd)

    def truncate(self, fd: int, size: int) -> None:
        os.ftruncate(fd, size)

    def removed(self, fd: int) -> bool:
        return os.fstat(fd).st_nlink == 0

    def close(self, fd: int) -> None:
        os.close(fd)

    def remove(self, path: Path) -> None:
        os.unlink(path)

    def rename(self, path: Path, target: Path) -> None:
        os.replace(path, target)

    def sync_directory(self, directory: Path) -> None:
        fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def free_bytes(self, directory: Path) -> int:
        status = os.statvfs(directory)
        return status.f_bavail * status.f_frsize

    def total_bytes(self, directory: Path) -> int:
        status = os.statvfs(directory)
        return status.f_blocks * status.f_frsize


def _open_lock(path: Path) -> int:
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    except OSError:
        return os.open(path, os.O_RDONLY)  # what it is there for is the lock, which needs no writing


def _sign(fd: int) -> None:
    """Writes who holds the lock, for the message of the next server. Overwrites in place: that needs no space
    where an earlier server signed."""
    signature = f"{os.getpid()} {socket.gethostname()}\n".encode()
    try:
        os.pwrite(fd, signature, 0)
        os.ftruncate(fd, len(signature))
    except OSError as error:
        logger.warning("The lock file does not name this process: %s", error)


def _holder(fd: int) -> tuple[str, str]:
    """The process that signed the lock file: its number, and what to call it."""
    holder, _, host = os.pread(fd, _HOLDER_BYTES, 0).decode("utf-8", "replace").strip().partition(" ")
    who = f"process {holder}" if holder else "another process"
    if host not in ("", socket.gethostname()):
        who += f" on {host} (a container has its id as its host's name)"
    return holder, who


def check_unused(directory: Path) -> None:
    """Raises StartupError where a server holds the directory's lock, and OSError where the lock cannot be read. A
    directory without one (an export, a part of a copy) is used by nobody.

    Takes a shared lock for an instant and gives it back; the file is opened for reading only.
    """
    try:
        fd = os.open(directory / LOCK_NAME, os.O_RDONLY)
    except FileNotFoundError:
        return
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise StartupError(
            f"The journal in {directory} is in use by {_holder(fd)[1]}: that server shows its episodes itself "
            "(turnstile ui --url URL --data-dir DIR). Stop it to read the directory."
        ) from error
    finally:
        os.close(fd)


class DirectoryLock:
    """Keeps a second writer out of a directory: an flock on a file that is never removed and holds the pid
    and the host's name, because in two containers both servers are process 1.

    The kernel releases it with the process, so a killed server leaves no stale lock.
    """

    def __init__(self, fd: int, path: Path) -> None:
        self._fd: int | None = fd
        self._path = path
        self._name = str(path)
        """Asked for at each write."""

    @classmethod
    def acquire(cls, directory: Path) -> DirectoryLock:
        """Raises StartupError naming the directory and the holder's pid, OSError when there is no such file and
        none can be made. A lock file that cannot be written (a full or read-only disk) locks all the same."""
        path = directory / LOCK_NAME
        fd = _open_lock(path)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _sign(fd)
        except BlockingIOError as error:
            holder, who = _holder(fd)
            os.close(fd)
            raise StartupError(
                f"The data directory {directory} is in use by {who}. Stop it, or choose another directory.",
                detail={"directory": str(directory), "pid": int(holder) if holder.isdigit() else None},
            ) from error
        except BaseException:
            os.close(fd)
            raise
        return cls(fd, path)

    def check(self) -> None:
        """Raises OSError where the held file is no longer the one in the directory.

        Somebody removed the directory or put another in its place, and a server that started since holds a lock
        of its own there: what this process knows of the segments is wrong, and it must change none of them.
        """
        if self._fd is None:
            raise OSError(errno.ESTALE, f"The lock {self._path} was released")
        held = os.fstat(self._fd)
        try:
            there = os.stat(self._name)
        except FileNotFoundError:
            there = None
        if there is None or (there.st_dev, there.st_ino) != (held.st_dev, held.st_ino):
            raise OSError(
                errno.ESTALE,
                f"{self._path} is gone or another's: the directory was removed or replaced while the server runs. "
                "Put it back, or start the server anew",
            )

    def release(self) -> None:
        """Idempotent."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None
