"""The only code that changes segment files while serving. One thread uses it at a time: ``commit`` sees to that.

What must hold: after ``write`` the first ``accepted`` records of the batch are as durable as the setting says and
the rest are not in the file. So a failed write is truncated back to the last good byte before anything else is
written. A file whose fdatasync failed is never appended to again, because the kernel reports such an error only
once.
"""

from __future__ import annotations

import errno
import logging
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from turnstile_server.journal.entries import IndexEntry, Journaled, SegmentMark, position
from turnstile_server.journal.file_operations import DirectoryLock, FileOps
from turnstile_server.journal.protocol import RecordType
from turnstile_server.journal.segments import FILE_HEADER, EncodedRecord, file_header, record_header, segment_path
from turnstile_server.journal.stats import JournalStats
from turnstile_server.settings import JournalSettings

BUFFERS_PER_WRITE = 512
"""Below Linux's IOV_MAX (1024)."""


@dataclass(slots=True)
class SegmentTail:
    """The place of the next record. ``fd`` None: a segment with this number is to be created."""

    segment: int
    nonce: int = 0
    fd: int | None = None
    offset: int = 0
    synced_to: int = 0


@dataclass(slots=True)
class WriteOutcome:
    """Outcome of a batch: its first ``accepted`` records are stored; ``error`` is why the others are not."""

    accepted: int = 0
    journaled: list[Journaled] = field(default_factory=list)
    error: OSError | None = None


class SegmentWriter:
    """Appends records at ``tail``, and starts a new segment when one is full."""

    def __init__(
        self,
        directory: Path,
        files: FileOps,
        settings: JournalSettings,
        stats: JournalStats,
        tail: SegmentTail,
        lock: DirectoryLock,
    ) -> None:
        self._directory = directory
        self._lock = lock
        self._files = files
        self._settings = settings
        self._stats = stats
        self._tail = tail
        self._power = settings.durability == "power"
        self._torn = False
        """Bytes of a failed write may lie behind ``_tail.offset``."""
        self._suspect = False
        """An fdatasync of this segment failed: the next record goes into a new one."""

    def write(self, batch: Sequence[EncodedRecord]) -> WriteOutcome:
        """Appends a batch. Never raises OSError; it is in the outcome."""
        written = WriteOutcome()
        rest = list(batch)
        try:
            while rest:
                self._lock.check()
                self._repair()
                self._make_room(rest[0].size, written)
                group = self._fitting(rest)
                self._write_group(group, written)
                written.accepted += len(group)
                rest = rest[len(group) :]
        except OSError as error:
            self._stats.write_failures += 1
            written.error = error
        return written

    def rotate(self) -> WriteOutcome:
        """Begins a new segment unless the current one is empty. Never raises OSError; it is in the outcome."""
        written = WriteOutcome()
        tail = self._tail
        try:
            self._lock.check()
            self._repair()
            if tail.fd is not None and tail.offset > FILE_HEADER.size:
                self._start_segment(tail.segment + 1, written)
        except OSError as error:
            written.error = error
        return written

    def only_appends(self, size: int) -> bool:
        """True if writing ``size`` bytes now is a write and nothing else: no new segment, no repair."""
        tail = self._tail
        if tail.fd is None or self._torn or self._suspect or self._power:
            return False
        return tail.offset == FILE_HEADER.size or tail.offset + size <= self._settings.segment_bytes

    def why_not(self, size: int) -> OSError | None:
        """The reason that ``size`` more bytes may not be written now: the directory is another's, or the disk is
        short of space (``min_free_bytes`` 0 allows all). None if they may be written."""
        try:
            self._lock.check()
            if not self._settings.min_free_bytes:
                return None
            free = self._files.free_bytes(self._directory)
        except OSError as error:
            return error
        if free - size >= self._settings.min_free_bytes:
            return None
        return OSError(errno.ENOSPC, f"{free} bytes free, {self._settings.min_free_bytes} are to stay free")

    def close(self) -> list[Journaled]:
        """Syncs and closes the segment. Errors are logged, because no caller waits for these bytes."""
        tail = self._tail
        marks: list[Journaled] = []
        if tail.fd is None:
            return marks
        try:
            self._repair()
            if tail.synced_to < tail.offset:
                self._sync(tail.fd)
                tail.synced_to = tail.offset
            marks.append(SegmentMark(tail.segment, tail.nonce, tail.synced_to))
        except OSError:
            logging.getLogger(__name__).exception("The last segment could not be synced at close")
        finally:
            self._files.close(tail.fd)
            tail.fd = None
        return marks

    def _fitting(self, rest: Sequence[EncodedRecord]) -> Sequence[EncodedRecord]:
        """The longest prefix that stays within the segment; at least one record."""
        end = self._tail.offset
        for count, encoded in enumerate(rest):
            end += encoded.size
            if end > self._settings.segment_bytes and count > 0:
                return rest[:count]
        return rest

    def _make_room(self, size: int, written: WriteOutcome) -> None:
        tail = self._tail
        full = tail.offset > FILE_HEADER.size and tail.offset + size > self._settings.segment_bytes
        if tail.fd is None:
            self._start_segment(tail.segment, written)
        elif full or self._suspect or self._files.removed(tail.fd):
            self._start_segment(tail.segment + 1, written)

    def _start_segment(self, segment: int, written: WriteOutcome) -> None:
        """Seals the current segment, creates the next. On failure the current one stays the current one."""
        path = segment_path(self._directory, segment)
        while True:
            try:
                fd = self._files.create(path)
                break
            except FileExistsError:  # left by a creation that failed and could not be undone
                segment += 1
                path = segment_path(self._directory, segment)
        nonce = secrets.randbits(64)
        try:
            self._write_all(fd, [memoryview(file_header(nonce))], 0)
            self._sync(fd)
            self._files.sync_directory(self._directory)
        except OSError:
            self._files.close(fd)
            self._files.remove(path)
            raise
        self._seal(written)
        self._tail = SegmentTail(segment, nonce, fd, FILE_HEADER.size, FILE_HEADER.size)
        self._suspect = False
        written.journaled.append(SegmentMark(segment, nonce, FILE_HEADER.size))

    def _seal(self, written: WriteOutcome) -> None:
        """A failing sync here loses no promise: under ``power`` every acknowledged byte is synced already."""
        tail = self._tail
        if tail.fd is None:
            return
        try:
            if tail.synced_to < tail.offset:
                self._sync(tail.fd)
                tail.synced_to = tail.offset
        except OSError:
            logging.getLogger(__name__).exception(
                "Segment %d could not be synced when it was closed", tail.segment
            )
        self._files.close(tail.fd)
        written.journaled.append(SegmentMark(tail.segment, tail.nonce, tail.synced_to))

    def _write_group(self, group: Sequence[EncodedRecord], written: WriteOutcome) -> None:
        tail = self._tail
        assert tail.fd is not None
        buffers: list[memoryview] = []
        entries: list[Journaled] = []
        end = tail.offset
        for encoded in group:
            buffers.append(memoryview(record_header(encoded)))
            buffers.extend(encoded.parts)
            at = position(tail.segment, end)
            entries.append(IndexEntry(encoded.type, encoded.episode_id, at, encoded.size, encoded.facts))
            end += encoded.size
        self._torn = True
        try:
            self._write_all(tail.fd, buffers, tail.offset)
            if self._power:
                self._sync(tail.fd)
        except OSError:
            self._repair_quietly()
            raise
        self._torn = False
        self._stats.appended_records += len(group)
        self._stats.appended_bytes += end - tail.offset
        self._stats.commits += 1
        tail.offset = end
        written.journaled += entries
        if self._power:
            tail.synced_to = end
            written.journaled.append(SegmentMark(tail.segment, tail.nonce, end))

    def _write_all(self, fd: int, buffers: list[memoryview], offset: int) -> None:
        first = 0
        while first < len(buffers):
            taken = self._files.write(fd, buffers[first : first + BUFFERS_PER_WRITE], offset)
            if taken <= 0:
                raise OSError(errno.EIO, "a write took no bytes")
            offset += taken
            while first < len(buffers) and taken >= len(buffers[first]):
                taken -= len(buffers[first])
                first += 1
            if taken:
                buffers[first] = buffers[first][taken:]

    def _repair(self) -> None:
        """Cuts what a failed write left. Until that succeeds nothing is written."""
        tail = self._tail
        if self._torn and tail.fd is not None:
            self._files.truncate(tail.fd, tail.offset)
            if self._power:
                self._sync(tail.fd)
            self._torn = False

    def _repair_quietly(self) -> None:
        try:
            self._repair()
        except OSError as error:  # callers get the error of the write itself; the next write repairs first
            logging.getLogger(__name__).error("A failed write could not be cut off yet: %s", error)

    def _sync(self, fd: int) -> None:
        started = time.perf_counter()
        try:
            self._files.sync(fd)
        except OSError:
            self._suspect = True
            raise
        finally:
            self._stats.fsyncs += 1
            self._stats.fsync_seconds += time.perf_counter() - started


def is_tombstone(encoded: EncodedRecord) -> bool:
    """Deletions are stored on a disk that is nearly full too, because they free it."""
    return encoded.type == RecordType.EPISODE_DELETED
