"""What the journal's suites share: small records, small settings, files that fail on demand."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bounded import bounded
from turnstile_server.journal.file_operations import RealFiles
from turnstile_server.journal.protocol import Record, RecordType
from turnstile_server.journal.recovery import list_segments
from turnstile_server.journal.segments import DamagedBytes, FoundRecord, scan
from turnstile_server.settings import JournalSettings

SMALL_SEGMENT = 1 << 16
INLINE: dict[str, Any] = {"durability": "process"}
"""Settings under which the event loop writes small records itself."""
WAY: dict[str, Any] = {}
"""Settings of the way that the records of a test take: of ``INLINE``, or none (the ``way`` fixture sets it)."""


def small(**overrides: Any) -> JournalSettings:
    """Small segments and no floor of free space, so that tests can fill both."""
    return bounded(
        JournalSettings,
        **{"segment_bytes": SMALL_SEGMENT, "min_free_bytes": 0, "index_lag_s": 0.01, **WAY, **overrides},
    )


def turn(episode_id: str, number: int, items: int = 4) -> Record:
    """A record that says which one it is, in its meta and in its array."""
    return Record(
        RecordType.TURN,
        episode_id,
        {"n": number, "text": f"turn {number} \u2028\x00\U0001f642"},
        {"ids": np.arange(number, number + items, dtype=np.int32)},
    )


def state(episode_id: str, status: str, **more: Any) -> Record:
    return Record(RecordType.EPISODE, episode_id, {"status": status, **more})


def numbers(records: Sequence[Record]) -> list[int]:
    """The numbers of ``turn`` records; checks that their arrays belong to them."""
    for record in records:
        ids = record.arrays["ids"]
        assert ids.dtype == np.int32
        assert ids.tolist() == list(range(record.meta["n"], record.meta["n"] + len(ids)))
    return [record.meta["n"] for record in records]


def segment_files(directory: Path) -> list[Path]:
    return sorted(directory.glob("segment-*.tsj"))


def pieces(directory: Path) -> list[FoundRecord | DamagedBytes]:
    """Everything a scan of all segments finds, read independently of journal and index."""
    found: list[FoundRecord | DamagedBytes] = []
    for segment in list_segments(directory):
        with segment.path.open("rb") as file:
            found += scan(file, 24, segment.size, segment.path.name)
    return found


def drop_index(directory: Path) -> None:
    for path in directory.glob("segment-*.tsi"):
        path.unlink()


def summaries(directory: Path) -> list[Path]:
    return sorted(directory.glob("segment-*.tsi"))


class FaultyFiles(RealFiles):
    """Real files; ``faults`` maps an operation's name to the errors that its next calls raise."""

    def __init__(self) -> None:
        self.faults: dict[str, list[OSError]] = {}
        self.short_write: int | None = None
        """The next write takes only this many bytes (for real), as a disk that is about to fill does."""
        self.synced: dict[str, int] = {}
        """Size of each file at its last sync, by name: what a power cut leaves for certain."""
        self.syncs = 0

    def _meet(self, operation: str) -> None:
        if errors := self.faults.get(operation):
            raise errors.pop(0)

    def create(self, path: Path) -> int:
        self._meet("create")
        return super().create(path)

    def write(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        if self.short_write is not None:
            taken, self.short_write = b"".join(buffers)[: self.short_write], None
            return os.pwrite(fd, taken, offset) if taken else 0
        self._meet("write")
        return super().write(fd, buffers, offset)

    def sync(self, fd: int) -> None:
        self._meet("sync")
        super().sync(fd)
        self.syncs += 1
        self.synced[Path(os.readlink(f"/proc/self/fd/{fd}")).name] = os.fstat(fd).st_size

    def truncate(self, fd: int, size: int) -> None:
        self._meet("truncate")
        super().truncate(fd, size)

    def remove(self, path: Path) -> None:
        self._meet("remove")
        super().remove(path)

    def rename(self, path: Path, target: Path) -> None:
        self._meet("rename")
        super().rename(path, target)


class QuotaFiles(RealFiles):
    """Real files on a disk that holds ``space`` more bytes: writes are cut short, then refused with ENOSPC."""

    def __init__(self, space: int) -> None:
        self.space = space

    def write(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        data = b"".join(buffers)[: self.space]
        if not data:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        taken = os.pwrite(fd, data, offset)
        self.space -= taken
        return taken

    def truncate(self, fd: int, size: int) -> None:
        self.space += max(os.fstat(fd).st_size - size, 0)
        super().truncate(fd, size)

    def free_bytes(self, directory: Path) -> int:
        return self.space
