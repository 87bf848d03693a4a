"""A closed segment's summary: where each of its records lies, beside the segment, so that a start need not scan
it.

It is derived from the segment alone and may lag, vanish or be damaged in any way. What must hold: a summary is
used whole or not at all. A digest over all its bytes, the segment's random number and the segment's size decide;
a segment whose summary is not used is scanned, and its summary written anew. A summary that cannot be written
costs a scan at the next start and nothing else.

Layout (little-endian): head, JSON list of the episode ids, rows, 16 bytes BLAKE2b of all before.

    head    0   8  magic "TSTLSUMM"
            8   4  version (1)
            12  4  bytes of the list of episode ids
            16  8  number of the segment's header (``nonce``)
            24  8  size of the segment
            32  8  damaged bytes in the segment
    row     0   8  offset of the record
            8   8  its length, header included
            16  2  its type
            18  4  its episode's place in the list
            22  8  ``ended_at`` (NaN: none)
            30  8  ``before`` (-1: none)
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import math
import os
import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import orjson

from turnstile_server.journal.entries import IndexEntry, Journaled, SegmentMark, place
from turnstile_server.journal.segments import FILE_HEADER, segment_path
from turnstile_server.journal.stats import JournalStats

logger = logging.getLogger(__name__)

MAGIC = b"TSTLSUMM"
VERSION = 1
SUFFIX = ".tsi"
_HEAD = struct.Struct("<8sIIQQQ")
_ROW = struct.Struct("<QQHIdq")
_DIGEST_BYTES = 16
NO_PLACE = -1


class UnusableSummary(ValueError):
    """The summary is damaged, of another version, or of another segment. The message says which."""


@dataclass(frozen=True, slots=True)
class Summary:
    """The contents of a summary. ``damaged_bytes``: of its segment, found when that was scanned."""

    segment: int
    damaged_bytes: int
    episodes: list[str]
    packed: bytes

    def rows(self) -> Iterator[tuple[int, int, int, int, float, int]]:
        """(offset, length, type, place of the episode, ``ended_at``, ``before``) of each record, in the order of
        the segment; NaN and ``NO_PLACE`` stand for none."""
        return _ROW.iter_unpack(self.packed)


class SummaryBuilder:
    """Collects the records of one segment, in order."""

    def __init__(self) -> None:
        self._bytes = 0
        self._episodes: dict[str, int] = {}
        self._rows = bytearray()

    def add(self, entry: IndexEntry) -> None:
        offset = place(entry.position)[1]
        facts = entry.facts
        self._rows += _ROW.pack(
            offset,
            entry.length,
            entry.type,
            self._episodes.setdefault(entry.episode_id, len(self._episodes)),
            math.nan if facts.ended_at is None else facts.ended_at,
            NO_PLACE if facts.before is None else facts.before,
        )
        self._bytes += entry.length

    def covers(self, size: int, damaged_bytes: int) -> bool:
        """True if the records and the damage are all that a segment of this size can hold."""
        return FILE_HEADER.size + self._bytes + damaged_bytes == size

    def bytes_of(self, nonce: int, size: int, damaged_bytes: int) -> bytes:
        """The file's bytes, for a segment with this number and size."""
        names = orjson.dumps(list(self._episodes))
        body = _HEAD.pack(MAGIC, VERSION, len(names), nonce, size, damaged_bytes) + names + bytes(self._rows)
        return body + _digest(body)


class Summaries:
    """Writes the summary of every segment of a directory when the segment is closed. Used by one thread."""

    def __init__(self, directory: Path, stats: JournalStats) -> None:
        self._directory = directory
        self._stats = stats
        self._mark: SegmentMark | None = None
        self._builder = SummaryBuilder()

    def take(self, items: Iterable[Journaled]) -> None:
        """Takes what was stored, in order; a mark of a new segment closes the one before."""
        for item in items:
            if not isinstance(item, SegmentMark):
                self._builder.add(item)
                continue
            if self._mark is not None and item.segment > self._mark.segment:
                self._write(self._mark, self._builder)
                self._builder = SummaryBuilder()
            self._mark = item

    def describe(self, items: Sequence[Journaled], mark: SegmentMark) -> None:
        """Writes the summary of a closed segment with these entries."""
        builder = SummaryBuilder()
        for item in items:
            if not isinstance(item, SegmentMark):
                builder.add(item)
        self._write(mark, builder)

    def remove(self, segment: int) -> None:
        summary_path(segment_path(self._directory, segment)).unlink(missing_ok=True)

    def give_up(self) -> bool:
        """Removes every summary, because the disk is full; True where there was one."""
        found = False
        for path in self._directory.glob(f"segment-*{SUFFIX}"):
            with contextlib.suppress(OSError):
                path.unlink()
                found = True
        return found

    def _write(self, mark: SegmentMark, builder: SummaryBuilder) -> None:
        path = segment_path(self._directory, mark.segment)
        try:
            size = path.stat().st_size
            if builder.covers(size, mark.damaged_bytes):
                write_summary(summary_path(path), builder.bytes_of(mark.nonce, size, mark.damaged_bytes))
        except FileNotFoundError:  # the segment was removed meanwhile
            return
        except OSError as error:  # the next start scans the segment
            self._stats.index_failures += 1
            logger.warning("The summary of %s could not be written: %s", path, error)


def summary_path(segment: Path) -> Path:
    return segment.with_suffix(SUFFIX)


def read_summary(path: Path, segment: int, nonce: int, size: int) -> Summary:
    """The summary of a segment with this number and size. Raises UnusableSummary, and OSError."""
    data = path.read_bytes()
    if len(data) < _HEAD.size + _DIGEST_BYTES:
        raise UnusableSummary("it is cut short")
    body, digest = data[:-_DIGEST_BYTES], data[-_DIGEST_BYTES:]
    if _digest(body) != digest:
        raise UnusableSummary("it is damaged")
    magic, version, names, theirs, covered, damaged = _HEAD.unpack_from(body)
    if (magic, version) != (MAGIC, VERSION):
        raise UnusableSummary(f"it has version {version}")
    if (theirs, covered) != (nonce, size):
        raise UnusableSummary("it belongs to another segment")
    start = _HEAD.size + names
    return Summary(segment, damaged, orjson.loads(body[_HEAD.size : start]), body[start:])


def write_summary(path: Path, data: bytes) -> None:
    """Writes the whole file or none. Raises OSError."""
    partial = path.with_name(f"{path.name}.new")
    try:
        partial.write_bytes(data)
        os.replace(partial, path)
    except OSError:
        with contextlib.suppress(OSError):
            partial.unlink()
        raise


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=_DIGEST_BYTES).digest()
