"""The bytes on disk: golden layout, exact round trips, one flipped bit costs one record."""

from __future__ import annotations

import io
import struct
import zlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from turnstile_server.errors import StartupError
from turnstile_server.journal.entries import UNKNOWN_END, facts_of, place, position
from turnstile_server.journal.protocol import Record, RecordType
from turnstile_server.journal.segments import (
    DamagedBytes,
    EncodedRecord,
    FoundRecord,
    decode,
    encode,
    file_header,
    identity_of,
    read_file_header,
    record_header,
    scan,
)

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
DTYPES = st.sampled_from(
    [np.int32, np.float32, np.uint8, np.int64, np.float64, np.bool_, np.dtype(">i4"), np.uint16]
)
ARRAYS = DTYPES.flatmap(lambda dtype: hnp.arrays(dtype, st.integers(0, 40)))


def on_disk(encoded: EncodedRecord, **kwargs: int) -> bytes:
    return record_header(encoded, **kwargs) + b"".join(encoded.parts)


def payload(encoded: EncodedRecord) -> bytes:
    return b"".join(encoded.parts)


def scanned(data: bytes, start: int = 0) -> list[FoundRecord | DamagedBytes]:
    return list(scan(io.BytesIO(data), start, len(data), "memory"))


def test_the_layout_is_the_documented_one_byte_for_byte() -> None:
    record = Record(RecordType.TURN, "ep", {"a": 1}, {"x": np.array([1, 2], np.int32)})
    document = b'{"meta":{"a":1},"arrays":[["x","<i4",2]]}'
    body = struct.pack("<HHI", 2, 0, len(document)) + b"ep" + document
    body += b"\0" * (-len(body) % 8) + bytes.fromhex("01000000 02000000")
    checked = struct.pack("<IHBB", len(body), 2, 1, 0)
    header = b"\xffTR\xfe" + struct.pack("<I", zlib.crc32(checked + body)) + checked
    assert on_disk(encode(record)) == header + body
    head = b"TSTLJRNL" + struct.pack("<HHQ", 1, 0, 7)
    assert file_header(7) == head + struct.pack("<I", zlib.crc32(head))


@pytest.mark.slow
@given(
    st.text(max_size=20), st.dictionaries(st.text(max_size=8), JSON), st.dictionaries(st.text(max_size=4), ARRAYS)
)
def test_any_record_comes_back_bit_for_bit(episode_id: str, meta: dict, arrays: dict) -> None:
    encoded = encode(Record(RecordType.TURN, episode_id, meta, arrays))
    (found,) = scanned(on_disk(encoded))
    assert isinstance(found, FoundRecord)
    assert found.length == encoded.size
    assert identity_of(found.payload) == episode_id
    back = decode(RecordType.TURN, found.payload)
    assert back.meta == meta
    assert list(back.arrays) == list(arrays)
    for name, array in arrays.items():
        assert back.arrays[name].dtype == array.dtype.newbyteorder("<")
        assert back.arrays[name].tobytes() == array.astype(array.dtype.newbyteorder("<")).tobytes()
        assert not back.arrays[name].flags.writeable


def test_integers_over_64_bits_and_lone_surrogates_survive() -> None:
    meta = {"seed": 2**80 + 1, "text": "\ud800 \udfff", "half": 0.1}
    assert decode(RecordType.TURN, payload(encode(Record(RecordType.TURN, "e", meta)))).meta == meta


def test_arrays_that_the_format_cannot_hold_are_refused() -> None:
    for array in (np.zeros((2, 2), np.int32), np.array(["a"]), np.array([1j]), np.array([None])):
        with pytest.raises(ValueError, match="one dimension of numbers"):
            encode(Record(RecordType.TURN, "e", {}, {"x": array}))


def test_an_array_changed_after_encoding_does_not_change_the_record() -> None:
    for items in (4, 100_000):
        array = np.zeros(items, np.int32)
        encoded = encode(Record(RecordType.TURN, "e", {}, {"x": array}))
        array[:] = 1
        assert not decode(RecordType.TURN, payload(encoded)).arrays["x"].any()


def test_a_large_read_only_array_is_not_copied() -> None:
    array = np.zeros(100_000, np.int32)
    array.flags.writeable = False
    encoded = encode(Record(RecordType.TURN, "e", {}, {"x": array}))
    assert any(np.shares_memory(np.frombuffer(part, np.uint8), array) for part in encoded.parts)


def test_every_single_flipped_bit_costs_its_own_record_and_no_other() -> None:
    records = [on_disk(encode(Record(RecordType.TURN, f"e{i}", {"n": i}))) for i in range(3)]
    data = b"".join(records)
    first, second = len(records[0]), len(records[0]) + len(records[1])
    for bit in range(first * 8, second * 8):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        found = scanned(bytes(flipped))
        assert [type(piece) for piece in found] == [FoundRecord, DamagedBytes, FoundRecord]
        assert found[1] == DamagedBytes(first, second)


@given(st.lists(st.binary(max_size=60) | st.integers(0, 5), max_size=12))
def test_a_scan_covers_every_byte_and_finds_every_whole_record_in_garbage(parts: list[bytes | int]) -> None:
    data, whole = b"", 0
    for part in parts:
        whole += isinstance(part, int)
        data += part if isinstance(part, bytes) else on_disk(encode(Record(RecordType.TURN, "e", {"n": part})))
    found = scanned(data)
    end = 0
    for piece in found:
        assert piece.offset == end
        end = piece.end if isinstance(piece, DamagedBytes) else piece.offset + piece.length
    assert end == len(data)
    assert sum(isinstance(piece, FoundRecord) for piece in found) == whole


def test_a_length_beyond_the_end_is_damage_and_reads_nothing() -> None:
    header = b"\xffTR\xfe" + struct.pack("<IIHBB", 0, 0xFFFFFFF0, 2, 1, 0)
    assert scanned(header + b"x" * 50) == [DamagedBytes(0, len(header) + 50)]


def test_a_record_inside_the_text_of_a_record_is_never_found() -> None:
    """Text cannot hold the marker, even where the outer record is damaged and the search goes through it."""
    inner = on_disk(encode(Record(RecordType.EPISODE_DELETED, "victim", {})))
    outer = bytearray(on_disk(encode(Record(RecordType.TURN, "e", {"text": inner.decode("latin-1")}))))
    outer[4] ^= 1
    assert scanned(bytes(outer)) == [DamagedBytes(0, len(outer))]


def test_a_newer_record_or_file_is_refused_by_name_and_a_damaged_version_is_not_taken_for_newer() -> None:
    newer = on_disk(encode(Record(RecordType.TURN, "e", {})), version=2)
    with pytest.raises(StartupError, match=r"memory holds a record of version 2 at byte 0; .* up to 1"):
        scanned(newer)
    with pytest.raises(StartupError, match="seg has format version 9; this server reads versions up to 1"):
        read_file_header(file_header(1, version=9), "seg")
    damaged = bytearray(file_header(1))
    damaged[8] = 9
    assert read_file_header(bytes(damaged), "seg") is None


def test_positions_order_like_segment_then_offset() -> None:
    assert place(position(3, 5)) == (3, 5)
    assert position(1, (1 << 40) - 1) < position(2, 0)


def test_an_ended_episode_says_when_and_others_do_not() -> None:
    def ended_at(**meta: object) -> float | None:
        return facts_of(RecordType.EPISODE, meta).ended_at

    assert ended_at(status="running", timings={"created_at": 5.0}) is None
    assert ended_at(status="completed", timings={"created_at": 5.0, "ended_s": 2.5}) == 7.5
    assert ended_at(status="failed") == UNKNOWN_END
    for status in ("completed", "failed", "cancelled", "timed_out", "truncated"):
        assert ended_at(status=status) is not None
