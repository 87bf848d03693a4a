"""Rewriting a segment without its dead records: at whatever step it fails or dies, nothing that lives is lost."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
from journal_support import FaultyFiles, drop_index, numbers, pieces, segment_files, small, state, turn

from turnstile_server.journal import FileJournal, RecordType
from turnstile_server.journal.segments import DamagedBytes

pytestmark = pytest.mark.anyio


class DyingFiles(FaultyFiles):
    """Copies the directory before each of its operations, once ``directory`` is set: every moment of a crash."""

    def __init__(self) -> None:
        super().__init__()
        self.directory: Path | None = None
        self.moments: list[Path] = []

    def _snap(self) -> None:
        if self.directory is not None:
            moment = self.directory.parent / f"moment-{len(self.moments)}"
            shutil.copytree(self.directory, moment)
            self.moments.append(moment)

    def create(self, path: Path) -> int:
        self._snap()
        return super().create(path)

    def write(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        self._snap()
        return super().write(fd, buffers, offset)

    def sync(self, fd: int) -> None:
        self._snap()
        super().sync(fd)

    def rename(self, path: Path, target: Path) -> None:
        self._snap()
        super().rename(path, target)
        self._snap()

    def remove(self, path: Path) -> None:
        self._snap()
        super().remove(path)
        self._snap()

    def sync_directory(self, directory: Path) -> None:
        self._snap()
        super().sync_directory(directory)
        self._snap()


async def mixed(directory: Path, files: FaultyFiles) -> FileJournal:
    """Long-lived and short-lived episodes in every segment, and an id that is used again."""
    journal = await FileJournal.open(directory, small(), files)
    for number in range(16):
        await journal.append(turn("long", number))
        await journal.append(turn("again", number))
        await journal.append(turn("short", number, items=3000))
        if number == 7:
            await journal.delete("again")
    await journal.append(state("long", "completed"))
    return journal


async def check(directory: Path, *, short: Sequence[Sequence[int]]) -> None:
    journal = await FileJournal.open(directory, small())
    assert numbers([r for r in await journal.read("long") if r.type == RecordType.TURN]) == list(range(16))
    assert numbers(await journal.read("again")) == list(range(8, 16))
    assert numbers(await journal.read("short")) in short
    assert journal.stats.corrupt_records == 0
    await journal.close()


async def test_a_crash_at_any_step_of_giving_space_back_loses_and_revives_nothing(tmp_path: Path) -> None:
    files = DyingFiles()
    directory = tmp_path / "data"
    journal = await mixed(directory, files)
    files.directory = directory
    await journal.delete("short")
    files.directory = None
    assert journal.stats.segments_compacted > 1
    await journal.close()
    assert len(files.moments) > 15
    before = list(range(16))
    gone = False
    for moment in files.moments:
        await check(moment, short=[[]] if gone else [before, []])
        journal = await FileJournal.open(moment, small())
        gone = gone or not await journal.read("short")
        await journal.close()
        drop_index(moment)
        await check(moment, short=[[]] if gone else [before])
    assert gone


async def test_a_rewriting_that_the_disk_refuses_changes_nothing_and_is_tried_again(tmp_path: Path) -> None:
    files = FaultyFiles()
    journal = await mixed(tmp_path, files)
    before = {path.name: path.read_bytes() for path in segment_files(tmp_path)[:-1]}
    files.faults = {"rename": [OSError(28, "No space left on device")] * 50}
    await journal.delete("short")
    assert journal.stats.segments_compacted == 0
    for name, data in before.items():
        assert (tmp_path / name).read_bytes() == data
    assert [path.name for path in segment_files(tmp_path) if path.name.endswith(".new")] == []
    assert numbers(await journal.read("again")) == list(range(8, 16))
    files.faults.clear()
    await journal.delete("short")
    assert journal.stats.segments_compacted > 1
    assert not any(isinstance(piece, DamagedBytes) for piece in pieces(tmp_path))
    await journal.close()
    await check(tmp_path, short=[[]])


async def test_a_segment_in_which_damage_is_found_is_kept_as_it_is(tmp_path: Path) -> None:
    journal = await mixed(tmp_path, FaultyFiles())
    first = segment_files(tmp_path)[0]
    data = bytearray(first.read_bytes())
    data[24 + 40] ^= 1  # the first turn of "long"
    first.write_bytes(data)
    await journal.delete("short")
    assert first.read_bytes() == data
    assert journal.stats.segments_compacted > 0
    assert numbers([r for r in await journal.read("long") if r.type == RecordType.TURN]) == list(range(1, 16))
    await journal.close()


async def test_nothing_of_an_episode_that_is_gone_stays_in_memory(tmp_path: Path) -> None:
    """A server that deletes what is old would else keep the names of all episodes that ever were."""
    journal = await FileJournal.open(tmp_path, small())
    await journal.append(state("kept", "completed"))
    for number in range(40):
        await journal.append(turn(f"gone-{number}", 0, items=3000))
        await journal.append(state(f"gone-{number}", "completed"))
    for number in range(40):
        await journal.delete(f"gone-{number}")
    await journal.append(turn("filler", 0, items=6000))  # the tombstones' segment is behind the last one now
    await journal.delete("filler")
    assert [each.episode_id async for each in journal.episodes()] == ["kept"]
    assert journal.stats.segments_compacted > 1
    db = journal._index._db
    names = [row[0] for row in await journal._in_thread(lambda: list(db.execute("SELECT episode_id FROM names")))]
    assert "kept" in names
    assert len(names) < 10
    await journal.close()
