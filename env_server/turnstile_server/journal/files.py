"""The file operations of a journal, behind one seam so that tests can make any of them fail; the directory lock.

Nothing here knows what the bytes mean.
"""

from __future__ import annotations

import fcntl
import os
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from turnstile_server.errors import StartupError

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

    def close(self, fd: int) -> None: ...

    def remove(self, path: Path) -> None: ...

    def sync_directory(self, directory: Path) -> None:
        """Names created or removed in ``directory`` are on stable storage."""
        ...

    def free_bytes(self, directory: Path) -> int:
        """Bytes that an unprivileged process may still write."""
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

    def close(self, fd: int) -> None:
        os.close(fd)

    def remove(self, path: Path) -> None:
        os.unlink(path)

    def sync_directory(self, directory: Path) -> None:
        fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def free_bytes(self, directory: Path) -> int:
        status = os.statvfs(directory)
        return status.f_bavail * status.f_frsize


class DirectoryLock:
    """Keeps a second writer out of a directory: an flock on a file that is never removed and holds the pid
    and the host's name, because in two containers both servers are process 1.

    The kernel releases it with the process, so a killed server leaves no stale lock.
    """

    def __init__(self, fd: int) -> None:
        self._fd: int | None = fd

    @classmethod
    def acquire(cls, directory: Path) -> DirectoryLock:
        """Raises StartupError naming the directory and the holder's pid, OSError when it cannot be written."""
        fd = os.open(directory / LOCK_NAME, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.ftruncate(fd, 0)
            os.pwrite(fd, f"{os.getpid()} {socket.gethostname()}\n".encode(), 0)
        except BlockingIOError as error:
            holder, _, host = os.pread(fd, _HOLDER_BYTES, 0).decode("utf-8", "replace").strip().partition(" ")
            os.close(fd)
            who = f"process {holder}" if holder else "another process"
            if host not in ("", socket.gethostname()):
                who += f" on {host} (a container has its id as its host's name)"
            raise StartupError(
                f"The data directory {directory} is in use by {who}. Stop it, or choose another directory.",
                detail={"directory": str(directory), "pid": int(holder) if holder.isdigit() else None},
            ) from error
        except BaseException:
            os.close(fd)
            raise
        return cls(fd)

    def release(self) -> None:
        """Idempotent."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None
