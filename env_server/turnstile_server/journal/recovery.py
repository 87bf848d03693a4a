"""Recovery of a directory when it is opened: bring the index up to date, cut a torn tail, find where to append.

Runs once, in the index thread, under the directory's lock. What must hold: no whole record is ever removed; only
bytes behind the last whole record of the last segment are cut (they were not acknowledged, or cannot be read);
damage anywhere else stays on disk, is counted and logged, and everything around it stays readable.
"""

from __future__ import annotations

import logging
import os
import re
from dataclasses import dataclass
from pathlib import Path

from turnstile_server.journal.entries import IndexEntry, Journaled, SegmentMark, facts_of, needs_meta, position
from turnstile_server.journal.files import FileOps
from turnstile_server.journal.index import JournalIndex
from turnstile_server.journal.segments import (
    FILE_HEADER,
    SEGMENT_PATTERN,
    DamagedBytes,
    FoundRecord,
    identity_of,
    meta_of,
    read_file_header,
    scan,
    segment_path,
)
from turnstile_server.journal.stats import JournalStats
from turnstile_server.journal.writer import SegmentTail

logger = logging.getLogger(__name__)

APPLY_AT_ONCE = 10_000
"""Entries per transaction of the index: bounds the memory of a full rebuild."""
_NAME = re.compile(r"segment-(\d{10})\.tsj")


@dataclass(frozen=True, slots=True)
class SegmentFile:
    """``nonce`` None: the file header is torn or damaged."""

    number: int
    path: Path
    size: int
    nonce: int | None


def recover(directory: Path, files: FileOps, index: JournalIndex, stats: JournalStats) -> SegmentTail:
    """Raises StartupError for segments of a newer format, OSError and sqlite3.Error."""
    segments = list_segments(directory)
    if segments and segments[-1].nonce is None:
        segments = _without_stillborn(segments, files, directory, stats)
    number, offset = _agreement(segments, index)
    last = segments[-1].number if segments else 0
    tail = SegmentTail(last + 1)
    for segment in segments:
        if segment.number < number:
            continue
        start = offset if segment.number == number else _start(segment)
        end = _index_segment(segment, max(start, _start(segment)), segment.number == last, index, stats)
        if segment.number == last and segment.nonce is not None:
            tail = _open_tail(segment, segment.nonce, end, files, stats)
    for mark in index.segments().values():
        if mark.damaged_bytes:
            logger.error(
                "Segment %s has %d damaged bytes; everything else in it is readable and it is kept",
                segment_path(directory, mark.segment),
                mark.damaged_bytes,
            )
    return tail


def list_segments(directory: Path) -> list[SegmentFile]:
    """In order. Raises StartupError for a newer format."""
    segments = []
    for path in sorted(directory.glob(SEGMENT_PATTERN)):
        match = _NAME.fullmatch(path.name)
        if match is None:
            continue
        with path.open("rb") as file:
            header = file.read(FILE_HEADER.size)
            size = os.fstat(file.fileno()).st_size
        segments.append(SegmentFile(int(match[1]), path, size, read_file_header(header, str(path))))
    return segments


def _start(segment: SegmentFile) -> int:
    return FILE_HEADER.size if segment.nonce is not None else 0


def _without_stillborn(
    segments: list[SegmentFile], files: FileOps, directory: Path, stats: JournalStats
) -> list[SegmentFile]:
    """Drops a last segment whose creation was cut short: nothing in it can have been acknowledged.

    One with a damaged header that holds whole records stays, for reading only.
    """
    last = segments[-1]
    with last.path.open("rb") as file:
        if any(isinstance(piece, FoundRecord) for piece in scan(file, 0, last.size, str(last.path))):
            return segments
    logger.warning("Removing %s: its creation was cut short (%d bytes)", last.path, last.size)
    stats.torn_bytes += last.size
    files.remove(last.path)
    files.sync_directory(directory)
    return segments[:-1]


def _agreement(segments: list[SegmentFile], index: JournalIndex) -> tuple[int, int]:
    """Up to which (segment, offset) the index can be trusted; it is cut or emptied to that."""
    known = index.segments()
    on_disk = {segment.number: segment for segment in segments}
    trusted = all(
        number in on_disk and (on_disk[number].nonce or 0) == mark.nonce and mark.synced_to <= on_disk[number].size
        for number, mark in known.items()
    )
    if not trusted:
        logger.warning("The index does not belong to these segments: it is rebuilt")
        index.cut(0, 0)
        known = {}
    for segment in segments:
        mark = known.get(segment.number)
        if mark is None:
            index.cut(segment.number, 0)
            return segment.number, 0
        if mark.synced_to < segment.size:
            index.cut(segment.number, mark.synced_to)
            return segment.number, mark.synced_to
    if not segments:
        return 0, 0
    return segments[-1].number, segments[-1].size


def _index_segment(segment: SegmentFile, start: int, last: bool, index: JournalIndex, stats: JournalStats) -> int:
    """Indexes ``[start, size)`` and returns the end of the last whole record (or ``start``)."""
    batch: list[Journaled] = []
    damage: list[DamagedBytes] = []
    end = start
    with segment.path.open("rb", buffering=1 << 20) as file:
        for piece in scan(file, start, segment.size, str(segment.path)):
            if isinstance(piece, DamagedBytes):
                damage.append(piece)
                continue
            end = piece.offset + piece.length
            batch.append(entry_of(segment.number, piece))
            if len(batch) >= APPLY_AT_ONCE:
                index.apply(batch)
                batch = []
    appendable = last and segment.nonce is not None
    if appendable and damage and damage[-1].end == segment.size:
        damage.pop()  # the torn tail
    for piece in damage:
        stats.corrupt_records += 1
        logger.error("Damage in %s, bytes %d to %d: kept, skipped", segment.path, piece.offset, piece.end)
    damaged = sum(piece.end - piece.offset for piece in damage)
    batch.append(SegmentMark(segment.number, segment.nonce or 0, end if appendable else segment.size, damaged))
    index.apply(batch)
    return end


def entry_of(segment: int, found: FoundRecord) -> IndexEntry:
    meta = meta_of(found.payload) if needs_meta(found.type) else {}
    return IndexEntry(
        found.type,
        identity_of(found.payload),
        position(segment, found.offset),
        found.length,
        facts_of(found.type, meta),
    )


def _open_tail(segment: SegmentFile, nonce: int, end: int, files: FileOps, stats: JournalStats) -> SegmentTail:
    fd = files.reopen(segment.path)
    try:
        if end < segment.size:
            logger.warning("Cutting a torn tail of %d bytes off %s", segment.size - end, segment.path)
            files.truncate(fd, end)
            stats.torn_bytes += segment.size - end
        files.sync(fd)
    except BaseException:
        files.close(fd)
        raise
    return SegmentTail(segment.number, nonce, fd, end, end)
