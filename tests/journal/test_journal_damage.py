"""Whatever happens to the files beside the segments, no sound record is missing; damage in a segment costs the
records that it hits and nothing else, and is told."""

from __future__ import annotations

import os
import random
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest
from journal_support import pieces, segment_files, small, state, summaries, turn

from turnstile_server.errors import StartupError
from turnstile_server.journal import FileJournal, JournalStats, Record, RecordType
from turnstile_server.journal.entries import place
from turnstile_server.journal.segments import FoundRecord, identity_of, meta_of

pytestmark = pytest.mark.anyio

NAMES = [f"ep-{number}" for number in range(12)]
Seen = tuple[dict[str, list[int]], dict[str, object]]


async def journal_of(directory: Path) -> None:
    """Twelve episodes over several segments, some deleted, one id used again, one running."""
    chance = random.Random(7)
    journal = await FileJournal.open(directory, small())
    for number in range(6):
        for name in NAMES:
            await journal.append(state(name, "running", round=number))
            await journal.append(turn(name, number, items=chance.choice([1, 200, 3000])))
        if number == 2:
            await journal.delete(NAMES[3])
    for name in NAMES[:-1]:
        await journal.append(state(name, "completed", round=6))
    await journal.delete(NAMES[5])
    await journal.close()


async def seen(directory: Path) -> tuple[Seen, JournalStats]:
    journal = await FileJournal.open(directory, small())
    turns = {
        name: [record.meta["n"] for record in await journal.read(name) if record.type == RecordType.TURN]
        for name in NAMES
    }
    states = {r.episode_id: (r.meta.get("status"), r.meta.get("round")) async for r in journal.episodes()}
    await journal.close()
    return (turns, dict(states)), journal.stats


def derived(directory: Path) -> list[Path]:
    return [*summaries(directory), directory / "reserve", directory / "lock"]


def flipped(path: Path, chance: random.Random) -> None:
    data = bytearray(path.read_bytes())
    for _ in range(chance.choice([1, 1, 8, 200])):
        if data:
            data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
    path.write_bytes(data)


def cut(path: Path, chance: random.Random) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: chance.randrange(len(data) + 1)])


def grown(path: Path, chance: random.Random) -> None:
    path.write_bytes(path.read_bytes() + chance.randbytes(chance.randrange(1, 5000)))


def garbage(path: Path, chance: random.Random) -> None:
    path.write_bytes(chance.randbytes(len(path.read_bytes())))


def zeros(path: Path, chance: random.Random) -> None:
    data = bytearray(path.read_bytes())
    start = chance.randrange(len(data) + 1)
    data[start:] = bytes(len(data) - start)
    path.write_bytes(data)


def a_folder(path: Path, chance: random.Random) -> None:
    path.unlink()
    path.mkdir()


def a_dangling_link(path: Path, chance: random.Random) -> None:
    path.unlink()
    path.symlink_to("/nowhere/at/all")


def a_loop(path: Path, chance: random.Random) -> None:
    path.unlink()
    path.symlink_to(path.name)


def gone(path: Path, chance: random.Random) -> None:
    path.unlink()


def anothers(path: Path, chance: random.Random) -> None:
    path.write_bytes(chance.choice(summaries(path.parent.parent / "other")).read_bytes())


def swapped(path: Path, chance: random.Random) -> None:
    other = chance.choice(summaries(path.parent))
    if other.is_file() and path.is_file():
        mine, theirs = path.read_bytes(), other.read_bytes()
        path.write_bytes(theirs)
        other.write_bytes(mine)


HARMS: list[Callable[[Path, random.Random], None]] = [
    flipped, cut, grown, garbage, zeros, a_folder, a_dangling_link, a_loop, gone, anothers, swapped,
]  # fmt: skip


async def harmed_everywhere(tmp_path: Path, trials: int, seed: int) -> None:
    chance = random.Random(seed)
    await journal_of(tmp_path / "whole")
    await journal_of(tmp_path / "other")
    expected, _ = await seen(tmp_path / "whole")
    assert len(expected[1]) == len(NAMES) - 1
    assert len(summaries(tmp_path / "whole")) > 2
    directory = tmp_path / "harmed"
    for trial in range(trials):
        shutil.copytree(tmp_path / "whole", directory)
        targets = [path for path in summaries(directory) if chance.random() < 0.6] or summaries(directory)[:1]
        told = []
        for path in targets:
            harm = chance.choice(HARMS)
            told.append((harm.__name__, path.name))
            if path.is_file():
                harm(path, chance)
        if chance.random() < 0.3:  # and what an older version, or a stranger, left
            (directory / "index.sqlite3").write_bytes(chance.randbytes(5000))
            (directory / "index.sqlite3-wal").mkdir()
            (directory / "segment-0000000001.tsi.new").write_bytes(b"half")
            (directory / "segment-x.tsj").write_bytes(b"no segment")
        found, stats = await seen(directory)
        assert found == expected, (seed, trial, told)
        assert stats.corrupt_records == 0
        assert (await seen(directory))[0] == expected, (seed, trial, told)
        shutil.rmtree(directory)


@pytest.mark.slow
async def test_no_harm_to_the_summaries_hides_a_record(tmp_path: Path) -> None:
    await harmed_everywhere(tmp_path, 40, seed=1)


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.timeout(1200)
async def test_no_harm_to_the_summaries_hides_a_record_in_hundreds_of_trials(tmp_path: Path) -> None:
    await harmed_everywhere(tmp_path, 500, seed=2)


async def test_a_damaged_summary_is_told_and_written_anew(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    await journal_of(tmp_path)
    first = summaries(tmp_path)[0]
    sound = first.read_bytes()
    flipped(first, random.Random(3))
    await seen(tmp_path)
    assert f"The summary {first} cannot be used: it is damaged. Its segment is read whole" in caplog.text
    assert first.read_bytes() == sound
    caplog.clear()
    await seen(tmp_path)
    assert "cannot be used" not in caplog.text


async def test_a_summary_that_leaves_a_record_out_is_not_written(tmp_path: Path) -> None:
    """The guard behind the digest: a summary must account for every byte of its segment."""
    journal = await FileJournal.open(tmp_path, small())
    await journal.append(turn("e", 0))
    journal._summaries._builder._bytes -= 1  # as if an entry had not reached it
    for number in range(1, 12):
        await journal.append(turn("e", number, items=3000))
    await journal.close()
    assert [path.name for path in summaries(tmp_path)] == ["segment-0000000002.tsi"]
    found, _ = await seen_turns(tmp_path)
    assert found == list(range(12))


async def seen_turns(directory: Path) -> tuple[list[int], JournalStats]:
    journal = await FileJournal.open(directory, small())
    found = [record.meta["n"] for record in await journal.read("e")]
    await journal.close()
    return found, journal.stats


async def damaged_segments(tmp_path: Path, trials: int, seed: int) -> None:
    chance = random.Random(seed)
    await journal_of(tmp_path / "whole")
    before, _ = await seen(tmp_path / "whole")
    records = whole_records(tmp_path / "whole")
    directory = tmp_path / "harmed"
    for trial in range(trials):
        shutil.copytree(tmp_path / "whole", directory)
        if chance.random() < 0.5:
            for path in summaries(directory):
                path.unlink()
        for _ in range(chance.choice([1, 2, 5])):
            path = chance.choice(segment_files(directory))
            data = bytearray(path.read_bytes())
            start, length = chance.randrange(24, len(data)), chance.choice([1, 1, 30, 3000])
            if chance.random() < 0.5:
                data[start : start + length] = chance.randbytes(len(data[start : start + length]))
            else:
                data[start] ^= 1 << chance.randrange(8)
            path.write_bytes(data)
        left = whole_records(directory)
        (turns, states), _ = await seen(directory)
        for name in NAMES:
            dead = set(before[0][name])
            wanted = [
                n for _, kind, episode, n in left if (kind, episode) == (RecordType.TURN, name) and n in dead
            ]
            assert [n for n in turns[name] if n in dead] == wanted, (seed, trial, name)
        sound_names = {episode for _, kind, episode, _ in left if kind in (1, 2)} & set(before[1])
        assert sound_names <= set(states), (seed, trial)
        for name in sound_names:
            last = max(at for at, kind, episode, _ in records if kind == 1 and episode == name)
            if any(at == last and episode == name for at, _, episode, _ in left):
                assert states[name] == before[1][name], (seed, trial, name)
        shutil.rmtree(directory)


def whole_records(directory: Path) -> list[tuple[tuple[str, int], int, str, int]]:
    """((segment, offset), type, episode, number) of every whole record, read without the journal."""
    found = []
    for path in segment_files(directory):
        alone = directory / "alone"
        alone.mkdir()
        shutil.copy(path, alone)
        for piece in pieces(alone):
            if isinstance(piece, FoundRecord):
                number = meta_of(piece.payload).get("n", -1)
                found.append(((path.name, piece.offset), piece.type, identity_of(piece.payload), number))
        shutil.rmtree(alone)
    return found


@pytest.mark.slow
async def test_damage_in_segments_costs_what_it_hits(tmp_path: Path) -> None:
    await damaged_segments(tmp_path, 25, seed=3)


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.timeout(1200)
async def test_damage_in_segments_costs_what_it_hits_in_hundreds_of_trials(tmp_path: Path) -> None:
    await damaged_segments(tmp_path, 400, seed=4)


async def damaged_state(tmp_path: Path, which: int) -> tuple[Path, int]:
    """An episode with a queued and a completed state and a turn; the state ``which`` is damaged."""
    journal = await FileJournal.open(tmp_path, small())
    await journal.append(state("e", "queued", n=-1))
    await journal.append(turn("e", 0))
    await journal.append(state("e", "completed", n=-1))
    await journal.append(state("other", "completed", n=-1))
    for number in range(12):  # so that the segment is closed
        await journal.append(turn("filler", number, items=3000))
    await journal.close()
    places = [at for at, kind, name, _ in whole_records(tmp_path) if (kind, name) == (1, "e")]
    path, offset = tmp_path / places[which][0], places[which][1]
    data = bytearray(path.read_bytes())
    data[offset + 40] ^= 1
    path.write_bytes(data)
    return path, offset


@pytest.mark.parametrize("summary", [True, False], ids=["with summary", "scanned"])
async def test_an_episode_whose_last_state_is_damaged_is_listed_as_that(
    tmp_path: Path, summary: bool, caplog: pytest.LogCaptureFixture
) -> None:
    path, offset = await damaged_state(tmp_path, -1)
    if not summary:
        path.with_suffix(".tsi").unlink()
    journal = await FileJournal.open(tmp_path, small())
    found = {record.episode_id: record async for record in journal.episodes()}
    assert set(found) == {"e", "other", "filler"}
    assert found["other"].damage is None
    assert found["e"].meta["status"] == "queued"
    if summary:
        assert found["e"].damage == f"{path} is damaged at byte {offset}"
    else:  # nobody knows what was there; the log tells what it seems to have been
        assert "it seems to have been a record EPISODE of episode 'e'" in caplog.text
    assert [record.meta["n"] for record in await journal.read("e")] == [-1, 0]
    await journal.delete("e")
    assert "e" not in {record.episode_id async for record in journal.episodes()}
    await journal.close()


async def test_a_segment_that_cannot_be_opened_stops_the_start_by_name(tmp_path: Path) -> None:
    await journal_of(tmp_path)
    first = segment_files(tmp_path)[0]
    first.rename(tmp_path / "away")
    first.mkdir()
    with pytest.raises(StartupError, match=rf"{first} of the journal cannot be read: Is a directory"):
        await FileJournal.open(tmp_path, small())
    first.rmdir()
    (tmp_path / "away").rename(first)
    await (await FileJournal.open(tmp_path, small())).close()


async def test_what_is_no_segment_but_has_the_name_of_one_stops_the_start_by_name(tmp_path: Path) -> None:
    """A pipe would hold the start for ever, a device has no end, and a number of nobody's has no position."""
    await journal_of(tmp_path)
    path = tmp_path / "segment-0000000009.tsj"
    os.mkfifo(path)
    with pytest.raises(StartupError, match=rf"{path} of the journal cannot be read: it is no file"):
        await FileJournal.open(tmp_path, small())
    path.unlink()
    path = tmp_path / "segment-9999999999.tsj"
    shutil.copy(segment_files(tmp_path)[0], path)
    with pytest.raises(StartupError, match=rf"{path} of the journal has a number"):
        await FileJournal.open(tmp_path, small())
    path.unlink()
    await (await FileJournal.open(tmp_path, small())).close()


@pytest.mark.slow
@pytest.mark.parametrize("which", [0, 1, -1])
@pytest.mark.parametrize("whole", [True, False])
async def test_a_segment_that_was_copied_within_the_directory_doubles_and_revives_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, which: int, whole: bool
) -> None:
    await journal_of(tmp_path)
    expected, _ = await seen(tmp_path)
    copied, copy = segment_files(tmp_path)[which], tmp_path / "segment-0000000070.tsj"
    size = copied.stat().st_size
    copy.write_bytes(copied.read_bytes()[: size if whole else size // 2])
    taken = copy.read_bytes()
    for _ in range(2):
        assert (await seen(tmp_path))[0] == expected
    assert f"{copy} is a copy of {copied}: it is renamed" in caplog.text
    assert copy.with_name(f"{copy.name}.copy").read_bytes() == taken
    journal = await FileJournal.open(tmp_path, small())
    for number in range(20):
        await journal.append(turn("later", number, items=3000))
    for name in NAMES:
        await journal.delete(name)
    await journal.close()
    journal = await FileJournal.open(tmp_path, small())
    assert [record.meta["n"] for record in await journal.read("later")] == list(range(20))
    assert [name for name in NAMES if await journal.read(name)] == []
    await journal.close()


async def test_segments_behind_links_are_read_and_appended_to(tmp_path: Path) -> None:
    await journal_of(tmp_path / "data")
    expected, _ = await seen(tmp_path / "data")
    for path in segment_files(tmp_path / "data"):
        path.rename(tmp_path / path.name)
        path.symlink_to(tmp_path / path.name)
    assert (await seen(tmp_path / "data"))[0] == expected


async def test_a_segment_with_unreadable_sectors_gives_the_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk error needs a broken disk, so ``read`` is made to fail for a range of the file."""
    journal = await FileJournal.open(tmp_path, small())
    for number in range(10):
        await journal.append(turn("e", number, items=1000))
    await journal.close()
    records = whole_records(tmp_path)
    bad = range(records[4][0][1] + 100, records[4][0][1] + 200)
    pread = os.pread

    class Broken:
        def __init__(self, file: object) -> None:
            self._file = file
            self._at = 0

        def seek(self, at: int) -> None:
            self._at = at

        def read(self, size: int) -> bytes:
            if self._at < bad.stop and self._at + size > bad.start:
                raise OSError(5, "Input/output error")
            return pread(self._file.fileno(), size, self._at)  # type: ignore[attr-defined]

        def fileno(self) -> int:
            return int(self._file.fileno())  # type: ignore[attr-defined]

        def __enter__(self) -> Broken:
            return self

        def __exit__(self, *_: object) -> None:
            self._file.close()  # type: ignore[attr-defined]

    opened = Path.open

    def broken(path: Path, mode: str = "r", *rest: object, **named: object) -> object:
        file = opened(path, mode, *rest, **named)  # type: ignore[call-overload]
        return Broken(file) if path.suffix == ".tsj" and "r" in mode else file

    monkeypatch.setattr(Path, "open", broken)
    found, stats = await seen_turns(tmp_path)
    assert found == [number for number in range(10) if number != 4]
    assert stats.corrupt_records == 1


async def test_a_directory_of_the_version_with_an_index_on_disk_opens(tmp_path: Path) -> None:
    await journal_of(tmp_path)
    expected, _ = await seen(tmp_path)
    for path in summaries(tmp_path):
        path.unlink()
    for suffix in ("", "-wal", "-shm"):
        (tmp_path / f"index.sqlite3{suffix}").write_bytes(b"SQLite format 3\x00" + bytes(4080))
    assert (await seen(tmp_path))[0] == expected
    assert not [name for name in os.listdir(tmp_path) if name.startswith("index.")]


def test_positions_name_the_place_that_the_log_tells() -> None:
    assert place((3 << 40) | 17) == (3, 17)


async def test_a_record_of_no_episode_under_a_right_checksum_is_damage(tmp_path: Path) -> None:
    journal = await FileJournal.open(tmp_path, small())
    await journal.append(turn("e", 0))
    await journal.append(Record(RecordType.EPISODE, "\u00e9", {"status": "running"}))
    await journal.append(turn("e", 1))
    await journal.close()
    (path,) = segment_files(tmp_path)

    (_, offset), *_ = [found[0] for found in whole_records(tmp_path) if found[2] == "\u00e9"]
    data = bytearray(path.read_bytes())
    at = data.index("\u00e9".encode(), offset)
    data[at : at + 2] = b"\xff\xff"
    length = int.from_bytes(data[offset + 8 : offset + 12], "little")
    crc = zlib.crc32(data[offset + 8 : offset + 16 + length])
    data[offset + 4 : offset + 8] = crc.to_bytes(4, "little")
    path.write_bytes(data)
    found, stats = await seen_turns(tmp_path)
    assert found == [0, 1]
    assert stats.corrupt_records == 1
