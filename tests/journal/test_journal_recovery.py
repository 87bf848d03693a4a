"""Whatever a crash or a bad disk leaves: every whole record is read, in order, and nothing readable is removed."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import pytest
from journal_support import (
    drop_index,
    numbers,
    pieces,
    segment_files,
    small,
    state,
    summaries,
    turn,
)

from turnstile_server.errors import StartupError
from turnstile_server.journal import FileJournal, JournalStats, Record, RecordType
from turnstile_server.journal.segments import FILE_HEADER, FoundRecord, encode, file_header, record_header
from waiting import wait_until

pytestmark = pytest.mark.anyio


async def written(directory: Path, count: int, items: int = 4, **settings: object) -> list[FoundRecord]:
    """A closed journal with turns 0..count of episode "e"; what a scan finds in it."""
    journal = await FileJournal.open(directory, small(**settings))
    for number in range(count):
        await journal.append(turn("e", number, items))
    await journal.close()
    found = pieces(directory)
    assert all(isinstance(piece, FoundRecord) for piece in found)
    return [piece for piece in found if isinstance(piece, FoundRecord)]


async def reopened(directory: Path) -> tuple[list[int], JournalStats]:
    """Turns of "e" after opening, and that appending works from there."""
    journal = await FileJournal.open(directory, small())
    found = numbers(await journal.read("e"))
    await journal.append(turn("e", 1000))
    assert numbers(await journal.read("e")) == [*found, 1000]
    await journal.close()
    return found, journal.stats


@pytest.mark.slow
@pytest.mark.parametrize("index", ["kept", "lost"])
async def test_a_write_torn_at_any_byte_of_the_last_two_records_keeps_all_before(
    tmp_path: Path, index: str
) -> None:
    """``kept``: the index was last updated before the torn records, as after a kill."""
    source = tmp_path / "source"
    journal = await FileJournal.open(source, small())
    for number in range(3):
        await journal.append(turn("e", number))
    await journal.close()
    (segment,) = segment_files(source)
    safe = segment.stat().st_size
    before = tmp_path / "before"
    shutil.copytree(source, before)
    journal = await FileJournal.open(source, small())
    await journal.append(turn("e", 3))
    await journal.append(turn("e", 4))
    await journal.close()
    data = segment.read_bytes()
    *_, fourth, fifth = pieces(source)
    for size in range(safe, len(data) + 1):
        torn = tmp_path / f"torn-{size}"
        shutil.copytree(before, torn)
        (torn / segment.name).write_bytes(data[:size])
        if index == "lost":
            drop_index(torn)
        whole = 3 + (size >= fifth.offset) + (size == len(data))
        found, stats = await reopened(torn)
        assert found == list(range(whole))
        assert stats.torn_bytes == size - (safe if whole == 3 else fifth.offset if whole == 4 else len(data))
        assert stats.corrupt_records == 0
        assert all(isinstance(piece, FoundRecord) for piece in pieces(torn))
        shutil.rmtree(torn)
    assert isinstance(fourth, FoundRecord)


async def test_a_tail_of_zeros_or_garbage_is_cut(tmp_path: Path) -> None:
    for name, tail in (
        ("zeros", bytes(5000)),
        ("garbage", b"\xffTR\xfe" * 40),
        ("lie", b"\xffTR\xfe" + b"\xff" * 12),
    ):
        directory = tmp_path / name
        await written(directory, 3)
        with segment_files(directory)[0].open("ab") as file:
            file.write(tail)
        found, stats = await reopened(directory)
        assert found == [0, 1, 2]
        assert stats.torn_bytes == len(tail)
        assert all(isinstance(piece, FoundRecord) for piece in pieces(directory))


@pytest.mark.parametrize("index", ["kept", "lost"])
async def test_a_flipped_bit_in_the_middle_costs_its_record_and_is_reported_and_kept(
    tmp_path: Path, index: str, caplog: pytest.LogCaptureFixture
) -> None:
    found = await written(tmp_path, 30, items=3000)
    segments = segment_files(tmp_path)
    assert len(segments) > 3
    data = bytearray(segments[1].read_bytes())
    second_start = [number for number, piece in enumerate(found) if piece.offset == FILE_HEADER.size][1]
    lost = second_start + 2
    data[found[lost].offset + 200] ^= 4
    segments[1].write_bytes(data)
    if index == "lost":
        drop_index(tmp_path)
    survivors, stats = await reopened(tmp_path)
    assert survivors == [number for number in range(30) if number != lost]
    assert stats.corrupt_records >= 1
    assert stats.torn_bytes == 0
    assert segments[1].read_bytes() == bytes(data)
    assert any(record.levelname == "ERROR" and segments[1].name in record.message for record in caplog.records)


async def test_damage_before_whole_records_of_the_last_segment_is_not_cut(tmp_path: Path) -> None:
    found = await written(tmp_path, 6)
    (segment,) = segment_files(tmp_path)
    data = bytearray(segment.read_bytes())
    data[found[2].offset + 8] ^= 0x40  # the length: the reader cannot step over it
    segment.write_bytes(data)
    drop_index(tmp_path)
    survivors, stats = await reopened(tmp_path)
    assert survivors == [0, 1, 3, 4, 5]
    assert (stats.torn_bytes, stats.corrupt_records) == (0, 1)
    assert (await reopened(tmp_path))[0] == [0, 1, 3, 4, 5, 1000]


async def test_a_segment_with_damage_is_never_removed(tmp_path: Path) -> None:
    found = await written(tmp_path, 30, items=3000)
    first = segment_files(tmp_path)[0]
    data = bytearray(first.read_bytes())
    data[found[1].offset + 100] ^= 1
    first.write_bytes(data)
    drop_index(tmp_path)
    journal = await FileJournal.open(tmp_path, small())
    await journal.delete("e")
    assert await journal.read("e") == []
    await journal.close()
    assert first.exists()
    assert len(segment_files(tmp_path)) == 2


async def test_a_damaged_file_header_costs_no_record(tmp_path: Path) -> None:
    for which in (0, -1):
        directory = tmp_path / str(which)
        await written(directory, 12, items=3000)
        path = segment_files(directory)[which]
        path.write_bytes(b"X" + path.read_bytes()[1:])
        found, stats = await reopened(directory)
        assert found == list(range(12))
        assert stats.corrupt_records == 1
        assert path.read_bytes()[:1] == b"X"


@pytest.mark.parametrize("size", [0, 1, 23, 24])
async def test_a_segment_whose_creation_was_cut_short_is_replaced(tmp_path: Path, size: int) -> None:
    await written(tmp_path, 3)
    (tmp_path / "segment-0000000002.tsj").write_bytes(file_header(5)[:size])
    found, stats = await reopened(tmp_path)
    assert found == [0, 1, 2]
    assert stats.torn_bytes == (size if size < FILE_HEADER.size else 0)


async def test_a_newer_format_is_refused_at_open_and_left_alone(tmp_path: Path) -> None:
    await written(tmp_path, 3)
    (segment,) = segment_files(tmp_path)
    data = segment.read_bytes()
    newer = encode(Record(RecordType.TURN, "e", {}))
    for content, sentence in (
        (data + record_header(newer, version=2) + b"".join(newer.parts), "record of version 2 at byte"),
        (file_header(1, version=2) + data[FILE_HEADER.size :], "format version 2"),
    ):
        segment.write_bytes(content)
        with pytest.raises(StartupError, match=sentence):
            await FileJournal.open(tmp_path, small())
        assert segment.read_bytes() == content
    segment.write_bytes(data)
    assert (await reopened(tmp_path))[0] == [0, 1, 2]


async def test_unknown_record_types_are_skipped_and_kept(tmp_path: Path) -> None:
    await written(tmp_path, 2)
    (segment,) = segment_files(tmp_path)
    strange = encode(Record(99, "e", {"new": True}))  # type: ignore[arg-type]
    with segment.open("ab") as file:
        file.write(record_header(strange) + b"".join(strange.parts))
    for _ in range(2):
        assert (await reopened(tmp_path))[0][:2] == [0, 1]
        drop_index(tmp_path)
    assert [piece.type for piece in pieces(tmp_path) if isinstance(piece, FoundRecord)] == [2, 2, 99, 2, 2]
    journal = await FileJournal.open(tmp_path, small())
    await journal.delete("e")
    assert await journal.read("e") == []
    await journal.close()


async def answers(directory: Path) -> tuple[dict[str, list[int]], list[tuple[str, object]]]:
    journal = await FileJournal.open(directory, small())
    reads = {
        name: numbers([record for record in await journal.read(name) if record.type == RecordType.TURN])
        for name in ("a", "b", "c", "d")
    }
    states = [(record.episode_id, record.meta["status"]) async for record in journal.episodes()]
    await journal.close()
    return reads, states


async def busy(directory: Path, rounds: range) -> None:
    """Appends over several segments, deletions, an id that is used again after its deletion."""
    journal = await FileJournal.open(directory, small())
    for number in rounds:
        for name in ("a", "b", "c", "d"):
            await journal.append(state(name, "running"))
            await journal.append(turn(name, number, items=1500))
        if number % 3 == 1:
            await journal.delete("b")
        if number % 4 == 2:
            await journal.delete("a")
    await journal.append(state("c", "completed"))
    await journal.close()


async def test_summaries_that_are_lost_give_the_same_answers(tmp_path: Path) -> None:
    await busy(tmp_path, range(12))
    expected = await answers(tmp_path)
    assert expected[0]["c"] == list(range(12))
    assert expected[0]["b"] == [11]
    assert len(summaries(tmp_path)) == len(segment_files(tmp_path)) - 1
    drop_index(tmp_path)
    assert await answers(tmp_path) == expected
    assert len(summaries(tmp_path)) == len(segment_files(tmp_path)) - 1
    assert await answers(tmp_path) == expected


@pytest.mark.slow
async def test_stale_summaries_are_not_believed(tmp_path: Path) -> None:
    directory = tmp_path / "data"
    await busy(directory, range(5))
    stale = {path.name: path.read_bytes() for path in summaries(directory)}
    await busy(directory, range(5, 30))  # now segments of the stale summaries are gone or rewritten
    expected = await answers(directory)
    for name, data in stale.items():
        (directory / name).write_bytes(data)
    assert await answers(directory) == expected


async def test_a_summary_that_knows_more_than_its_segment_holds_is_not_believed(tmp_path: Path) -> None:
    """A segment from an older backup beside a newer summary."""
    found = await written(tmp_path, 30, items=3000)
    first, *_ = segment_files(tmp_path)
    first.write_bytes(first.read_bytes()[: found[3].offset])
    survivors, stats = await reopened(tmp_path)
    assert survivors[:4] == [0, 1, 2, 5]
    assert (stats.torn_bytes, stats.corrupt_records) == (0, 0)


async def test_the_last_segment_is_read_whole_and_the_others_by_their_summaries(tmp_path: Path) -> None:
    """A damaged byte in a closed segment stays unnoticed at open (it is noticed when it is read)."""
    found = await written(tmp_path, 30, items=3000)
    first = segment_files(tmp_path)[0]
    data = bytearray(first.read_bytes())
    data[found[0].offset + 100] ^= 1
    first.write_bytes(data)
    journal = await FileJournal.open(tmp_path, small())
    assert journal.stats.corrupt_records == 0
    assert numbers(await journal.read("e")) == list(range(1, 30))
    assert journal.stats.corrupt_records == 1
    await journal.close()


async def test_under_process_durability_the_unsynced_segment_is_scanned_again(tmp_path: Path) -> None:
    """A power cut may take bytes that the index already knows."""
    directory = tmp_path / "data"
    journal = await FileJournal.open(directory, small(durability="process"))
    for number in range(8):
        await journal.append(turn("e", number, items=3000))

    async def rotation_is_indexed() -> bool:
        return len(summaries(directory)) == 1

    await wait_until(rotation_is_indexed)
    await asyncio.sleep(0.05)
    cut = tmp_path / "cut"
    shutil.copytree(directory, cut)
    await journal.close()
    last = segment_files(cut)[-1]
    data = last.read_bytes()
    last.write_bytes(data[:5000] + bytes(len(data) - 5000))
    assert (await reopened(cut))[0] == list(range(5))
