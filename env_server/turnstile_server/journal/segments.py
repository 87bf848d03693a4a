"""The bytes of a segment: encoding, decoding, scanning and reading. This module writes no file.

Layout (all integers little-endian; these headers never change their size or place):

    segment := file_header record*
    file_header (24 bytes)
        0   8  magic "TSTLJRNL"
        8   2  format version (1)
        10  2  zero
        12  8  nonce: random, so that an index of other segments is never taken for this one's
        20  4  CRC-32 of bytes 0..20
    record := header payload
    header (16 bytes)
        0   4  marker ff 54 52 fe
        4   4  CRC-32 (zlib) of bytes 8..16 of this header and of the payload
        8   4  payload length
        12  2  type (RecordType)
        14  1  record version (1)
        15  1  zero
    payload
        0   2  length of the episode id
        2   2  flags: 1 = the document needs a JSON reader with unbounded integers and lone surrogates
        4   4  length of the document
        8      episode id, UTF-8
               document, JSON: {"meta": {...}, "arrays": [[name, dtype, count], ...]}
               zeros up to a multiple of 8 from the payload's start
               per array: its elements, little-endian, then zeros up to a multiple of 8

What must hold: a record is whole or it is not there (the CRC decides); a type that a reader does not know is
skipped; a version newer than this code, under a correct CRC, is refused and never guessed. The marker holds
two bytes that no UTF-8 text contains, so that text in a payload cannot pass for a record when a reader looks for
the next whole record behind damage.
"""

from __future__ import annotations

import errno
import json
import logging
import struct
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
import orjson

from turnstile_server.errors import StartupError
from turnstile_server.journal.entries import RecordFacts, RecordLocation, facts_of, place
from turnstile_server.journal.protocol import Record, RecordType
from turnstile_server.journal.stats import JournalStats

MAGIC = b"TSTLJRNL"
MARKER = b"\xffTR\xfe"
FORMAT_VERSION = 1
RECORD_VERSION = 1
FILE_HEADER = struct.Struct("<8sHHQI")
RECORD_HEADER = struct.Struct("<4sIIHBB")
MAX_PAYLOAD = (1 << 32) - 1
_CHECKED = struct.Struct("<IHBB")
_PREFIX = struct.Struct("<HHI")
_ALIGN = 8
_PADDING = tuple(bytes(count) for count in range(_ALIGN))
"""So many zeros."""
_WIDE_JSON = 1
_JOIN_BELOW = 64 << 10
"""Payloads below this are copied into one buffer; larger arrays are written from where they lie."""
_SEARCH = 1 << 20
_SECTOR = 4096
_SHOWN_ID = 100
SEGMENT_SUFFIX = ".tsj"
SEGMENT_PATTERN = f"segment-*{SEGMENT_SUFFIX}"
_KNOWN_TYPES = frozenset(int(kind) for kind in RecordType)

logger = logging.getLogger(__name__)


def segment_path(directory: Path, segment: int) -> Path:
    return directory / f"segment-{segment:010d}.tsj"


@dataclass(frozen=True, slots=True)
class EncodedRecord:
    """A record ready for the disk but for its header, whose CRC the writer's thread computes."""

    type: int
    episode_id: str
    parts: tuple[memoryview, ...]
    size: int
    """Bytes on disk, header included."""
    facts: RecordFacts


@dataclass(frozen=True, slots=True)
class FoundRecord:
    """A whole record at ``offset``; ``length`` counts its header."""

    offset: int
    length: int
    type: int
    payload: bytes


@dataclass(frozen=True, slots=True)
class DamagedBytes:
    """Bytes ``[offset, end)`` hold no whole record."""

    offset: int
    end: int


def encode(record: Record) -> EncodedRecord:
    """Raises ValueError for arrays that are not one-dimensional numbers or a record of 4 GiB and more,
    TypeError for meta that is not JSON. Read-only arrays are not copied: they must not change any more."""
    arrays, directory = [], []
    for name, given in record.arrays.items():
        array = _little_endian(name, given)
        arrays.append(array)
        directory.append((name, array.dtype.str, array.size))
    document, flags = _dumps({"meta": dict(record.meta), "arrays": directory})
    identity = record.episode_id.encode()
    if len(identity) > 0xFFFF:
        raise ValueError("an episode id of more than 65535 bytes")
    head = b"".join((_PREFIX.pack(len(identity), flags, len(document)), identity, document))
    parts: list[bytes | memoryview] = [head, _PADDING[-len(head) % _ALIGN]]
    size = len(head) + -len(head) % _ALIGN
    for array in arrays:
        length = array.nbytes
        parts += (array.view(np.uint8).data, _PADDING[-length % _ALIGN])
        size += length + -length % _ALIGN
    if size > MAX_PAYLOAD:
        raise ValueError(f"a record of {size} bytes; the largest is {MAX_PAYLOAD}")
    if size < _JOIN_BELOW:
        views: tuple[memoryview, ...] = (memoryview(b"".join(parts)),)
    else:
        views = tuple(memoryview(part) for part in parts if len(part))
    return EncodedRecord(
        int(record.type), record.episode_id, views, RECORD_HEADER.size + size, facts_of(record.type, record.meta)
    )


def record_header(encoded: EncodedRecord, version: int = RECORD_VERSION) -> bytes:
    """The 16 bytes before the payload."""
    length = encoded.size - RECORD_HEADER.size
    crc = zlib.crc32(_CHECKED.pack(length, encoded.type, version, 0))
    for part in encoded.parts:
        crc = zlib.crc32(part, crc)
    return RECORD_HEADER.pack(MARKER, crc, length, encoded.type, version, 0)


def file_header(nonce: int, version: int = FORMAT_VERSION) -> bytes:
    head = FILE_HEADER.pack(MAGIC, version, 0, nonce, 0)[:-4]
    return head + struct.pack("<I", zlib.crc32(head))


def read_file_header(header: bytes, name: str) -> int | None:
    """The segment's nonce, or None when the header is torn or damaged. Raises StartupError for a newer format."""
    if len(header) < FILE_HEADER.size:
        return None
    magic, version, _, nonce, crc = FILE_HEADER.unpack_from(header)
    if magic != MAGIC or crc != zlib.crc32(header[: FILE_HEADER.size - 4]):
        return None
    if version > FORMAT_VERSION:
        raise _newer(f"Segment {name} has format version {version}", FORMAT_VERSION)
    return int(nonce)


def identity_of(payload: bytes) -> str:
    """The episode id of a record, without parsing the rest."""
    length, _, _ = _PREFIX.unpack_from(payload)
    return payload[_PREFIX.size : _PREFIX.size + length].decode()


def meta_of(payload: bytes) -> dict[str, Any]:
    meta: dict[str, Any] = _document(payload)[0]["meta"]
    return meta


def decode(record_type: RecordType, payload: bytes) -> Record:
    """The record of a whole payload; its arrays are read-only views of ``payload``."""
    document, at = _document(payload)
    arrays: dict[str, npt.NDArray[np.generic]] = {}
    for name, dtype, count in document["arrays"]:
        at += -at % _ALIGN
        array = np.frombuffer(payload, np.dtype(dtype), count, at) if count else np.empty(0, np.dtype(dtype))
        array.flags.writeable = False
        arrays[name] = array
        at += array.nbytes
    return Record(record_type, identity_of(payload), document["meta"], arrays)


def read_at(file: BinaryIO, offset: int, end: int, name: str) -> FoundRecord | None:
    """The whole record at ``offset``, or None. Raises StartupError for a record of a newer version."""
    if offset + RECORD_HEADER.size > end:
        return None
    header = _read(file, offset, RECORD_HEADER.size)
    if len(header) < RECORD_HEADER.size:
        return None
    marker, crc, length, record_type, version, _ = RECORD_HEADER.unpack(header)
    if marker != MARKER or offset + RECORD_HEADER.size + length > end:
        return None
    payload = _read(file, offset + RECORD_HEADER.size, length)
    if len(payload) < length or zlib.crc32(payload, zlib.crc32(header[8:])) != crc:
        return None
    if version > RECORD_VERSION:
        raise _newer(f"Segment {name} holds a record of version {version} at byte {offset}", RECORD_VERSION)
    return FoundRecord(offset, RECORD_HEADER.size + length, record_type, payload)


def apparent_record(file: BinaryIO, offset: int) -> str:
    """A description of what a damaged place seems to have held, for the log: its header and its episode id may be
    whole."""
    head = _read(file, offset, RECORD_HEADER.size + _PREFIX.size)
    if len(head) < RECORD_HEADER.size + _PREFIX.size or head[: len(MARKER)] != MARKER:
        return ""
    _, _, length, kind, _, _ = RECORD_HEADER.unpack_from(head)
    identity, _, _ = _PREFIX.unpack_from(head, RECORD_HEADER.size)
    name = _read(file, offset + len(head), min(identity, _SHOWN_ID)).decode("utf-8", "replace")
    known = RecordType(kind).name if kind in _KNOWN_TYPES else f"of type {kind}"
    return f" (it seems to have been a record {known} of episode {name!r} with {length} bytes)"


def scan(file: BinaryIO, start: int, end: int, name: str) -> Iterator[FoundRecord | DamagedBytes]:
    """Whole records and the damage between them, in order, covering ``[start, end)`` without gaps.

    Behind damage the search goes on at the next marker, so that a flipped bit costs one record.
    """
    offset = start
    while offset < end:
        found = read_at(file, offset, end, name)
        if found is not None:
            yield found
            offset += found.length
            continue
        damaged_from = offset
        while found is None and offset < end:
            offset = _next_marker(file, offset + 1, end)
            found = read_at(file, offset, end, name)
        yield DamagedBytes(damaged_from, offset)


class RecordReader:
    """Reads records by their locations, in the journal's index thread.

    A record whose CRC fails is left out, logged and counted; the rest of the episode is still given.
    """

    def __init__(self, path_of: Callable[[int], Path], stats: JournalStats) -> None:
        self._path_of = path_of
        self._stats = stats

    def records(self, episode_id: str, locations: Sequence[RecordLocation]) -> list[Record]:
        """Records of an episode at ``locations``, which are in order; types this server does not know are skipped.

        Raises OSError. A segment that is gone (somebody moved it) is damage like any other.
        """
        records: list[Record] = []
        for segment, group in groupby(locations, key=lambda location: place(location.position)[0]):
            path = self._path_of(segment)
            try:
                file = path.open("rb")
            except FileNotFoundError:
                lost = len(list(group))
                self._stats.corrupt_records += lost
                logger.error("%s is gone: %d records of %s are lost", path, lost, episode_id)
                continue
            with file:
                for location in group:
                    if location.type not in _KNOWN_TYPES:
                        continue
                    offset = place(location.position)[1]
                    found = read_at(file, offset, offset + location.length, str(path))
                    if found is None or identity_of(found.payload) != episode_id:
                        self._stats.corrupt_records += 1
                        name = RecordType(location.type).name
                        logger.error(
                            "Damage in %s at byte %d: a record %s of %s is lost", path, offset, name, episode_id
                        )
                        continue
                    records.append(decode(RecordType(found.type), found.payload))
        return records


def _read(file: BinaryIO, offset: int, size: int) -> bytes:
    """At most ``size`` bytes; nothing where the disk has an error (EIO), which is damage like any other."""
    try:
        file.seek(offset)
        return file.read(size)
    except OSError as error:
        if error.errno != errno.EIO:
            raise
        return b""


def _next_marker(file: BinaryIO, start: int, end: int) -> int:
    """Offset of the next marker at or after ``start``; ``end`` when there is none."""
    while start + len(MARKER) <= end:
        block = _read(file, start, min(_SEARCH, end - start))
        if not block:  # something in it is unreadable: go on sector by sector
            following = (start // _SECTOR + 1) * _SECTOR
            at = _read(file, start, following - start).find(MARKER)
            if at >= 0:
                return start + at
            start = following
            continue
        at = block.find(MARKER)
        if at >= 0:
            return start + at
        if len(block) < len(MARKER):
            return end
        start += len(block) - len(MARKER) + 1
    return end


def _newer(what: str, known: int) -> StartupError:
    return StartupError(
        f"{what}; this server reads versions up to {known}. Use a newer server for this data directory."
    )


def _document(payload: bytes) -> tuple[dict[str, Any], int]:
    identity, flags, length = _PREFIX.unpack_from(payload)
    start = _PREFIX.size + identity
    text = payload[start : start + length]
    document: dict[str, Any] = json.loads(text) if flags & _WIDE_JSON else orjson.loads(text)
    return document, start + length


def _little_endian(name: str, array: npt.NDArray[np.generic]) -> npt.NDArray[np.generic]:
    if array.ndim != 1 or array.dtype.kind not in "biuf" or array.dtype.itemsize > _ALIGN:
        raise ValueError(f"array {name!r}: one dimension of numbers expected, got {array.dtype} {array.shape}")
    little = np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("<"))
    return little.copy() if little.flags.writeable and little.nbytes >= _JOIN_BELOW else little


def _dumps(value: Any) -> tuple[bytes, int]:
    """JSON and its flags. What orjson refuses and JSON allows (integers over 64 bits, lone surrogates) takes
    the slow way, there and back."""
    try:
        return orjson.dumps(value), 0
    except orjson.JSONEncodeError:
        return json.dumps(value, allow_nan=False).encode("ascii"), _WIDE_JSON
