"""Recovery of a directory when it is opened: build the index, cut a torn tail, find where to append.

``recover`` runs once, in the index thread, under the directory's lock; ``survey`` is its counterpart for a
directory that is only read. What must hold: no whole record is ever removed; only
bytes behind the last whole record of the last segment are cut (they were not acknowledged, or cannot be read);
damage anywhere else stays on disk, is counted and logged, and everything around it stays readable.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
import struct
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from turnstile_server.errors import StartupError
from turnstile_server.journal.entries import (
    OFFSET_BITS,
    IndexEntry,
    Journaled,
    SegmentMark,
    facts_of,
    needs_meta,
    position,
)
from turnstile_server.journal.file_operations import FileOps
from turnstile_server.journal.index import JournalIndex
from turnstile_server.journal.segments import (
    FILE_HEADER,
    SEGMENT_PATTERN,
    SEGMENT_SUFFIX,
    DamagedBytes,
    FoundRecord,
    apparent_record,
    identity_of,
    meta_of,
    read_file_header,
    scan,
    segment_path,
)
from turnstile_server.journal.stats import JournalStats
from turnstile_server.journal.summaries import Summaries, UnusableSummary, read_summary, summary_path
from turnstile_server.journal.writer import SegmentTail

logger = logging.getLogger(__name__)

REPORTED_SCAN = 64 << 20
"""A start that reads more bytes than this says so."""
MOST_SEGMENTS = (1 << 62 - OFFSET_BITS) - 1
"""The highest number of a segment: positions in it fit into 63 bits, as the index and the summaries have them."""
_NAME = re.compile(r"segment-(\d{10})\.tsj")


@dataclass(frozen=True, slots=True)
class SegmentFile:
    """``nonce`` None: the file header is torn or damaged."""

    number: int
    path: Path
    size: int
    nonce: int | None


def recover(
    directory: Path, files: FileOps, index: JournalIndex, summaries: Summaries, stats: JournalStats
) -> SegmentTail:
    """Raises StartupError for segments of a newer format and segments that cannot be opened, and OSError."""
    _remove_leftovers(directory)
    segments = list_segments(directory)
    number = segments[-1].number if segments else 0
    if segments and segments[-1].nonce is None:
        segments = _without_stillborn(segments, files, directory, stats)
    segments = _without_copies(segments, files)
    tail = SegmentTail(number + 1)
    scanned = 0
    for segment in segments:
        last = segment is segments[-1]
        if not last and _take_summary(segment, index):
            continue
        scanned += segment.size
        end = _index_segment(segment, last, index, summaries, stats)
        if last and segment.nonce is not None:
            tail = _open_tail(segment, segment.nonce, end, files, stats)
    if scanned > REPORTED_SCAN:
        logger.info("%d bytes of the journal in %s were read to find its records", scanned, directory)
    for mark in index.marks().values():
        if mark.damaged_bytes:
            logger.error(
                "Segment %s has %d damaged bytes; everything else in it is readable and it is kept",
                segment_path(directory, mark.segment),
                mark.damaged_bytes,
            )
    return tail


def _remove_leftovers(directory: Path) -> None:
    """Removes what no version reads any more: half-written files, and the index on disk of versions before 0.2."""
    for name in ("index.sqlite3", "index.sqlite3-wal", "index.sqlite3-shm"):
        with contextlib.suppress(OSError):
            (directory / name).unlink()
    for path in directory.glob("segment-*.new"):
        with contextlib.suppress(OSError):
            path.unlink()


def _take_summary(segment: SegmentFile, index: JournalIndex) -> bool:
    """Indexes a closed segment from its summary. False, with a line in the log, where that cannot be used."""
    path = summary_path(segment.path)
    if segment.nonce is None:
        return False
    try:
        summary = read_summary(path, segment.number, segment.nonce, segment.size)
    except FileNotFoundError:
        logger.info("%s has no summary: it is read whole", segment.path)
        return False
    except (OSError, UnusableSummary) as error:
        logger.warning("The summary %s cannot be used: %s. Its segment is read whole", path, error)
        return False
    mark = SegmentMark(segment.number, segment.nonce, segment.size, summary.damaged_bytes)
    index.apply_summary(summary, mark)
    return True


def list_segments(directory: Path) -> list[SegmentFile]:
    """In order. Raises StartupError for a newer format, and for a segment that cannot be read."""
    segments = []
    for path in sorted(directory.glob(SEGMENT_PATTERN)):
        match = _NAME.fullmatch(path.name)
        if match is None:
            continue
        if int(match[1]) > MOST_SEGMENTS:
            raise StartupError(
                f"The segment {path} of the journal has a number that no journal reaches. Move it out of the "
                "directory, or give it back its name."
            )
        try:
            segments.append(_segment_file(int(match[1]), path))
        except OSError as error:
            # Without it the server would show fewer episodes than there are, and nobody would miss them.
            raise StartupError(
                f"The segment {path} of the journal cannot be read: {error.strerror}. Make it readable again, or "
                "move it out of the directory to start without its episodes."
            ) from error
    return segments


def _segment_file(number: int, path: Path) -> SegmentFile:
    """Raises StartupError for a newer format, and OSError."""
    if path.exists() and not path.is_file() and not path.is_dir():  # to open a pipe would never end
        raise OSError(errno.EINVAL, "it is no file")
    with path.open("rb") as file:
        header = file.read(FILE_HEADER.size)
        size = os.fstat(file.fileno()).st_size
    return SegmentFile(number, path, size, read_file_header(header, str(path)))


def survey(directory: Path, index: JournalIndex, stats: JournalStats) -> dict[int, Path]:
    """Indexes all that can be read in the directory, and gives the segments' files by number. Changes nothing.

    Exported episodes are segments with names of their own (``EPISODE.tsj``); they get the numbers behind the
    others'. What cannot be opened is left out, with a line in the log. Raises StartupError for a newer format,
    where there is no segment, and where neither a head nor a record of one can be read; and OSError.
    """
    segments = _readable(sorted(directory.glob(f"*{SEGMENT_SUFFIX}")))
    if not segments:
        raise StartupError(f"{directory} holds no segment (*{SEGMENT_SUFFIX}) of a journal that can be read.")
    for copy, whole in _copies(segments):
        logger.warning("%s is a copy of %s: it is not read", copy.path, whole.path)
        segments.remove(copy)
    for segment in segments:
        last = segment is segments[-1]
        if not last and _take_summary(segment, index):
            continue
        end = _index_segment(segment, last, index, None, stats)
        if last and segment.nonce is not None and end < segment.size:
            logger.warning(
                "%s ends with %d bytes of no whole record: passed over", segment.path, segment.size - end
            )
    if all(segment.nonce is None for segment in segments) and not index.episodes():
        raise StartupError(
            f"no record can be read in {directory}: its files *{SEGMENT_SUFFIX} are none of a journal, or "
            "destroyed. Name the data directory of a server, or an export"
        )
    return {segment.number: segment.path for segment in segments}


def _readable(paths: list[Path]) -> list[SegmentFile]:
    """In the order of their numbers. Raises StartupError for a newer format."""
    numbers = {path: int(match[1]) for path in paths if (match := _NAME.fullmatch(path.name))}
    following = count(max(numbers.values(), default=0) + 1)
    segments = []
    for path in paths:
        number = numbers[path] if path in numbers else next(following)
        if number > MOST_SEGMENTS:
            logger.error("%s is not read: it has a number that no journal reaches", path)
            continue
        try:
            segments.append(_segment_file(number, path))
        except OSError as error:
            logger.error("%s cannot be read: %s. What is in it is not shown", path, error.strerror)
    return sorted(segments, key=lambda segment: segment.number)


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
    try:
        files.remove(last.path)
        files.sync_directory(directory)
    except OSError as error:  # a read-only disk: it is passed over, and its number is not used again
        logger.error("%s could not be removed: %s", last.path, error)
    return segments[:-1]


def _without_copies(segments: list[SegmentFile], files: FileOps) -> list[SegmentFile]:
    """Renames segments that somebody copied within the directory: their records are there already, in the segment
    with the same random number. Of two the longer one stays, because later records are in it alone. Left in its
    place a copy would be read once the other is deleted, and deleted episodes would be back."""
    copies: set[int] = set()
    for copy, whole in _copies(segments):
        copies.add(copy.number)
        aside = copy.path.with_name(f"{copy.path.name}.copy")
        logger.error("%s is a copy of %s: it is renamed to %s and not read", copy.path, whole.path, aside.name)
        try:
            files.rename(copy.path, aside)
        except OSError as error:  # a read-only disk: nothing is deleted there
            logger.error("%s could not be renamed: %s", copy.path, error)
    return [segment for segment in segments if segment.number not in copies]


def _copies(segments: list[SegmentFile]) -> list[tuple[SegmentFile, SegmentFile]]:
    """Segments with the random number of another one, which is at least as long, each with that one."""
    kept: dict[int, SegmentFile] = {}
    copies = []
    for segment in segments:
        if segment.nonce is None:
            continue
        other = kept.setdefault(segment.nonce, segment)
        if other is segment:
            continue
        copy, whole = (other, segment) if segment.size > other.size else (segment, other)
        kept[segment.nonce] = whole
        copies.append((copy, whole))
    return copies


def _index_segment(
    segment: SegmentFile, last: bool, index: JournalIndex, summaries: Summaries | None, stats: JournalStats
) -> int:
    """Indexes a segment from its bytes; returns the end of the last whole record. ``summaries`` None: none is
    written."""
    entries: list[Journaled] = []
    damage: list[DamagedBytes] = []
    end = start = FILE_HEADER.size if segment.nonce is not None else 0
    with segment.path.open("rb", buffering=1 << 20) as file:
        for piece in scan(file, start, segment.size, str(segment.path)):
            if isinstance(piece, DamagedBytes):
                damage.append(piece)
                continue
            try:
                entries.append(entry_of(segment.number, piece))
            except (ValueError, KeyError, TypeError, struct.error):  # a right checksum over what is no record
                damage.append(DamagedBytes(piece.offset, piece.offset + piece.length))
                continue
            end = piece.offset + piece.length
        appendable = last and segment.nonce is not None
        if appendable and damage and damage[-1].end == segment.size:
            damage.pop()  # the torn tail
        for piece in damage:
            stats.corrupt_records += 1
            logger.error(
                "Damage in %s, bytes %d to %d%s: kept, skipped",
                segment.path,
                piece.offset,
                piece.end,
                apparent_record(file, piece.offset),
            )
    damaged = sum(piece.end - piece.offset for piece in damage)
    mark = SegmentMark(segment.number, segment.nonce or 0, end if appendable else segment.size, damaged)
    entries.append(mark)
    index.apply(entries)
    if summaries is None:
        return end
    if appendable:
        summaries.take(entries)
    elif segment.nonce is not None:
        summaries.describe(entries, mark)
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
    """The last segment, ready to append to. Where the disk refuses that (read-only, an I/O error), the next record
    begins a new segment, as soon as the disk takes it; until then everything can be read."""
    fd: int | None = None
    try:
        fd = files.reopen(segment.path)
        if end < segment.size:
            logger.warning("Cutting a torn tail of %d bytes off %s", segment.size - end, segment.path)
            files.truncate(fd, end)
            stats.torn_bytes += segment.size - end
        files.sync(fd)
    except OSError as error:
        logger.error("%s cannot be appended to: %s. New records go into a new segment", segment.path, error)
        if fd is not None:
            files.close(fd)
        return SegmentTail(segment.number + 1)
    return SegmentTail(segment.number, nonce, fd, end, end)
