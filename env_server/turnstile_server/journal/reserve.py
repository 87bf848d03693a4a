"""Space that is kept for deletions: a file of zeros, given up when the disk is full.

A deletion is a record too. On a disk without a free byte the journal gives up this file, writes the deletion into
its place, and makes the file again as soon as there is room. A second file, made and removed at once, is how the
journal finds out that a disk which refused a record has room for it again. Used by the writer thread only.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
from pathlib import Path

from turnstile_server.journal.file_operations import FileOps

logger = logging.getLogger(__name__)

RESERVE_NAME = "reserve"
PROBE_NAME = "probe"
MOST_PROBED = 1 << 20
"""Bytes; a disk with this much room is not full, even if it refused a larger record."""
MOST_OF_DISK = 64
"""The reserve takes at most this part of the file system: 1/64."""
DISK_ERRORS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO})


class Reserve:
    """The reserve file of one directory. ``size`` 0: there is none, and nothing is given up."""

    def __init__(self, directory: Path, files: FileOps, size: int) -> None:
        self._path = directory / RESERVE_NAME
        self._directory = directory
        self._files = files
        self._size = size
        self._told = False

    def give_up(self) -> bool:
        """Frees the file's space; True if there was any."""
        try:
            os.unlink(self._path)
        except OSError:
            return False
        logger.warning(
            "The disk that holds %s is full: the journal's reserve for deletions is used", self._directory
        )
        return True

    def try_disk(self, keep_free: int, *, refused: int | None) -> None:
        """Makes the file where it is missing and ``keep_free`` bytes stay free beside it. ``refused``: the disk
        took no record of so many bytes; the file is made whatever stays free, and a file of that size beside it.
        Raises OSError where the disk has no place for that. Something else in a file's place (a folder, a link) is
        left alone: then there is no reserve, but that says nothing of the disk."""
        try:
            self._hold(keep_free, refused is not None)
            if refused is not None:
                self._make(self._directory / PROBE_NAME, min(max(refused, 1), MOST_PROBED))
                os.unlink(self._directory / PROBE_NAME)
        except OSError as error:
            if error.errno in DISK_ERRORS:
                raise
            if not self._told:
                logger.warning("There is no reserve for deletions on a full disk: %s", error)
            self._told = True

    def _hold(self, keep_free: int, whatever_stays: bool) -> None:
        size = min(self._size, self._files.total_bytes(self._directory) // MOST_OF_DISK)
        held = self._held()
        if not size or (held is not None and held >= size):
            return
        if held is None and not whatever_stays and self._files.free_bytes(self._directory) - size < keep_free:
            return
        self._make(self._path, size)

    def _make(self, path: Path, size: int) -> None:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        try:
            os.posix_fallocate(fd, 0, size)
            os.pwrite(fd, bytes(1), 0)
            os.fdatasync(fd)
        except OSError:
            with contextlib.suppress(OSError):
                os.unlink(path)
            raise
        finally:
            os.close(fd)

    def _held(self) -> int | None:
        try:
            return os.lstat(self._path).st_size
        except OSError:
            return None
