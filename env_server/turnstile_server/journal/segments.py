"""The bytes of a segment: encoding, decoding and scanning. No file is written here, nothing is decided.

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

import json
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
import orjson

from turnstile_server.errors import StartupError
from turnstile_server.journal.entries import Facts, facts_of
from turnstile_server.journal.protocol import Record, RecordType

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
_WIDE_JSON = 1
_JOIN_BELOW = 64 << 10
"""Payloads below this are copied into one buffer; larger arrays are written from where they lie."""
_SEARCH = 1 << 20


@dataclass(frozen=True, slots=True)
class Encoded:
    """A record ready for the disk but for its header, whose CRC the writer's thread computes."""

    type: int
    episode_id: str
    parts: tuple[memoryview, ...]
    size: int
    """Bytes on disk, header included."""
    facts: Facts


@dataclass(frozen=True, slots=True)
class Found:
    """A whole record at ``offset``; ``length`` counts its header."""

    offset: int
    length: int
    type: int
    payload: bytes


@dataclass(frozen=True, slots=True)
class Damaged:
    """Bytes ``[offset, end)`` hold no whole record."""

    offset: int
    end: int


def encode(record: Record) -> Encoded:
    """Raises ValueError for arrays that are not one-dimensional numbers or a record of 4 GiB and more,
    TypeError for meta that is not JSON. Read-only arrays are not copied: they must not change any more."""
    arrays = [(name, _little_endian(name, array)) for name, array in record.arrays.items()]
    directory = [(name, array.dtype.str, array.size) for name, array in arrays]
    document, flags = _dumps({"meta": dict(record.meta), "arrays": directory})
    identity = record.episode_id.encode()
    if len(identity) > 0xFFFF:
        raise ValueError("an episode id of more than 65535 bytes")
    head = b"".join((_PREFIX.pack(len(identity), flags, len(document)), identity, document))
    parts: list[bytes | memoryview] = [head, _padding(len(head))]
    for _, array in arrays:
        parts += [array.view(np.uint8).data, _padding(array.nbytes)]
    size = sum(len(part) for part in parts)
    if size > MAX_PAYLOAD:
        raise ValueError(f"a record of {size} bytes; the largest is {MAX_PAYLOAD}")
    if size < _JOIN_BELOW:
        parts = [b"".join(parts)]
    views = tuple(memoryview(part) for part in parts if len(part))
    return Encoded(
        int(record.type), record.episode_id, views, RECORD_HEADER.size + size, facts_of(record.type, record.meta)
    )


def record_header(encoded: Encoded, version: int = RECORD_VERSION) -> bytes:
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


def read_at(file: BinaryIO, offset: int, end: int, name: str) -> Found | None:
    """The whole record at ``offset``, or None. Raises StartupError for a record of a newer version."""
    if offset + RECORD_HEADER.size > end:
        return None
    file.seek(offset)
    header = file.read(RECORD_HEADER.size)
    if len(header) < RECORD_HEADER.size:
        return None
    marker, crc, length, record_type, version, _ = RECORD_HEADER.unpack(header)
    if marker != MARKER or offset + RECORD_HEADER.size + length > end:
        return None
    payload = file.read(length)
    if len(payload) < length or zlib.crc32(payload, zlib.crc32(header[8:])) != crc:
        return None
    if version > RECORD_VERSION:
        raise _newer(f"Segment {name} holds a record of version {version} at byte {offset}", RECORD_VERSION)
    return Found(offset, RECORD_HEADER.size + length, record_type, payload)


def scan(file: BinaryIO, start: int, end: int, name: str) -> Iterator[Found | Damaged]:
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
        yield Damaged(damaged_from, offset)


def _next_marker(file: BinaryIO, start: int, end: int) -> int:
    """Offset of the next marker at or after ``start``; ``end`` when there is none."""
    while start + len(MARKER) <= end:
        file.seek(start)
        block = file.read(min(_SEARCH, end - start))
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


def _padding(length: int) -> bytes:
    return bytes(-length % _ALIGN)


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
