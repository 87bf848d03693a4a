"""Disks that fill up and fail: the turn is refused, nothing acknowledged is lost, later ones are stored again."""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from journal_support import (
    FaultyFiles,
    QuotaFiles,
    drop_index,
    numbers,
    pieces,
    segment_files,
    small,
    state,
    summaries,
    turn,
)

from real_disk import tmpfs
from turnstile_server.errors import JournalUnavailable
from turnstile_server.journal import FileJournal
from turnstile_server.journal.file_operations import FileOps, RealFiles
from turnstile_server.journal.segments import FoundRecord
from waiting import wait_until

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("way")]

DISK = 1 << 20


def fault(code: int = errno.EIO) -> OSError:
    return OSError(code, os.strerror(code))


class Disk:
    """A small disk: how to fill it from outside the journal and how to free it again."""

    def __init__(self, directory: Path, files: FileOps, ballast: Path | None) -> None:
        self.directory = directory
        self.files = files
        self._ballast = ballast

    def free(self) -> None:
        if self._ballast is not None:
            self._ballast.unlink()
        if isinstance(self.files, QuotaFiles):
            self.files.space += DISK


@pytest.fixture
def quota_disk(tmp_path: Path) -> Disk:
    return Disk(tmp_path / "data", QuotaFiles(DISK), None)


@pytest.fixture
def real_disk(tmp_path: Path) -> Iterator[Disk]:
    """A tmpfs of 3 MiB, a third of it taken by others."""
    with tmpfs(tmp_path / "mount", "size=3m") as mount:
        ballast = mount / "ballast"
        ballast.write_bytes(bytes(DISK))
        yield Disk(mount / "data", RealFiles(), ballast)


@pytest.fixture(params=["quota_disk", "real_disk"])
def disk(request: pytest.FixtureRequest) -> Disk:
    found: Disk = request.getfixturevalue(request.param)
    return found


async def fill(journal: FileJournal, start: int = 0) -> list[int]:
    """Appends until the journal refuses for good; returns the acknowledged numbers. (A summary that is being
    written takes some of the last bytes for a moment.)"""
    acknowledged = []
    refused = 0
    for number in range(start, start + 10_000):
        (answer,) = await asyncio.gather(journal.append(turn("e", number, items=3000)), return_exceptions=True)
        if not isinstance(answer, int):
            assert isinstance(answer, JournalUnavailable)
            assert "No space left on device" in answer.message
            refused += 1
            if refused == 5:
                return acknowledged
            await asyncio.sleep(0.02)
            continue
        refused = 0
        acknowledged.append(number)
    raise AssertionError("the disk never filled")


async def test_a_full_disk_refuses_loses_nothing_and_works_again_once_space_is_free(
    disk: Disk, tmp_path: Path
) -> None:
    journal = await FileJournal.open(disk.directory, small(), disk.files)
    acknowledged = await fill(journal)
    assert len(acknowledged) > 20
    for _ in range(3):
        with pytest.raises(JournalUnavailable):
            await journal.append(turn("e", 9_999, items=3000))
    assert numbers(await journal.read("e")) == acknowledged
    disk.free()
    await journal.append(turn("e", 20_000))
    again = await fill(journal, start=20_001)
    expected = [*acknowledged, 20_000, *again]
    assert numbers(await journal.read("e")) == expected
    await journal.close()
    assert all(isinstance(piece, FoundRecord) for piece in pieces(disk.directory))
    elsewhere = tmp_path / "copy"  # a rebuilt index needs room, and this disk is full again
    shutil.copytree(disk.directory, elsewhere, ignore=shutil.ignore_patterns("index.*"))
    journal = await FileJournal.open(elsewhere, small())
    assert numbers(await journal.read("e")) == expected
    assert (journal.stats.torn_bytes, journal.stats.corrupt_records) == (0, 0)
    await journal.close()


async def test_a_full_disk_under_concurrent_appends_answers_each_one_truly(disk: Disk) -> None:
    journal = await FileJournal.open(disk.directory, small(), disk.files)
    answers = await asyncio.gather(
        *(journal.append(turn("e", number, items=3000)) for number in range(400)), return_exceptions=True
    )
    acknowledged = [number for number, answer in enumerate(answers) if isinstance(answer, int)]
    assert 0 < len(acknowledged) < 400
    assert all(isinstance(answer, JournalUnavailable) for answer in answers if not isinstance(answer, int))
    assert numbers(await journal.read("e")) == acknowledged
    await journal.close()


@pytest.mark.parametrize("taken", [0, 1, 15, 16, 17, 60, 100])
async def test_a_short_write_then_an_error_leaves_no_trace(tmp_path: Path, taken: int) -> None:
    files = FaultyFiles()
    journal = await FileJournal.open(tmp_path, small(), files)
    await journal.append(turn("e", 0))
    size = segment_files(tmp_path)[0].stat().st_size
    files.short_write, files.faults["write"] = taken, [fault(errno.ENOSPC)]
    with pytest.raises(JournalUnavailable):
        await journal.append(turn("e", 1))
    assert segment_files(tmp_path)[0].stat().st_size == size
    files.faults.clear()
    await journal.append(turn("e", 2))
    await journal.close()
    journal = await FileJournal.open(tmp_path, small())
    assert numbers(await journal.read("e")) == [0, 2]
    await journal.close()


async def test_a_short_write_without_an_error_goes_on(tmp_path: Path) -> None:
    files = FaultyFiles()
    journal = await FileJournal.open(tmp_path, small(), files)
    await journal.append(turn("e", 0))
    for number, taken in enumerate((1, 16, 30, 77), start=1):
        files.short_write = taken
        await journal.append(turn("e", number))
    assert numbers(await journal.read("e")) == [0, 1, 2, 3, 4]
    await journal.close()


async def test_a_failed_fsync_refuses_and_the_file_is_never_appended_to_again(tmp_path: Path) -> None:
    files = FaultyFiles()
    journal = await FileJournal.open(tmp_path, small(durability="power"), files)
    await journal.append(turn("e", 0))
    files.faults["sync"] = [fault()]
    with pytest.raises(JournalUnavailable, match="Input/output error"):
        await journal.append(turn("e", 1))
    (first,) = segment_files(tmp_path)
    size = first.stat().st_size
    await journal.append(turn("e", 2))
    assert len(segment_files(tmp_path)) == 2
    assert first.stat().st_size == size
    await journal.close()
    journal = await FileJournal.open(tmp_path, small())
    assert numbers(await journal.read("e")) == [0, 2]
    await journal.close()


async def test_while_a_failed_write_cannot_be_cut_off_nothing_is_written(tmp_path: Path) -> None:
    files = FaultyFiles()
    journal = await FileJournal.open(tmp_path, small(), files)
    await journal.append(turn("e", 0))
    files.short_write = 40
    files.faults = {"write": [fault(), fault(), fault()], "truncate": [fault(), fault()]}
    for number in (1, 2):
        with pytest.raises(JournalUnavailable):
            await journal.append(turn("e", number))
    assert len(files.faults["write"]) == 2, "the second append must not reach the disk"
    files.faults.clear()
    await journal.append(turn("e", 3))
    assert numbers(await journal.read("e")) == [0, 3]
    await journal.close()
    journal = await FileJournal.open(tmp_path, small())
    assert numbers(await journal.read("e")) == [0, 3]
    assert journal.stats.torn_bytes == 0
    await journal.close()


@pytest.mark.parametrize("operation", ["create", "sync", "write"])
async def test_a_rotation_that_fails_refuses_and_is_tried_again(tmp_path: Path, operation: str) -> None:
    files = FaultyFiles()
    journal = await FileJournal.open(tmp_path, small(), files)
    acknowledged = []
    for number in range(5):
        await journal.append(turn("e", number, items=3000))
        acknowledged.append(number)
    files.faults = {operation: [fault()], "remove": [fault()]}
    with pytest.raises(JournalUnavailable):
        await journal.append(turn("e", 5, items=3000))
    files.faults.clear()
    for number in range(6, 20):
        await journal.append(turn("e", number, items=3000))
        acknowledged.append(number)
    assert numbers(await journal.read("e")) == acknowledged
    await journal.close()
    drop_index(tmp_path)
    journal = await FileJournal.open(tmp_path, small())
    assert numbers(await journal.read("e")) == acknowledged
    await journal.close()


async def test_below_min_free_bytes_turns_are_refused_but_deleting_still_works(tmp_path: Path) -> None:
    files = QuotaFiles(4 << 20)
    journal = await FileJournal.open(tmp_path, small(min_free_bytes=1 << 20), files)
    await journal.append(state("old", "completed"))
    await journal.append(turn("old", 0))
    files.space = (1 << 20) - 1
    with pytest.raises(JournalUnavailable, match="1048576 are to stay free"):
        await journal.append(turn("e", 0))
    await journal.delete("old")
    assert await journal.read("old") == []
    files.space = 2 << 20
    await journal.append(turn("e", 1))
    assert numbers(await journal.read("e")) == [1]
    await journal.close()


async def test_a_failed_append_soon_is_counted_and_not_raised(tmp_path: Path) -> None:
    files = FaultyFiles()
    journal = await FileJournal.open(tmp_path, small(), files)
    await journal.append(turn("e", 0))
    files.faults["write"] = [fault(errno.ENOSPC)]
    journal.append_soon(turn("e", 1))
    await journal.flush()
    assert journal.stats.refused_records == 1
    assert journal.stats.write_failures == 1
    await journal.append(turn("e", 2))
    assert numbers(await journal.read("e")) == [0, 2]
    await journal.close()


async def test_a_bug_in_the_file_layer_refuses_the_batch_and_the_writer_lives_on(tmp_path: Path) -> None:
    class Broken(FaultyFiles):
        broken = False

        def write(self, fd: int, buffers: object, offset: int) -> int:
            if self.broken:
                raise RuntimeError("a bug")
            return super().write(fd, buffers, offset)  # type: ignore[arg-type]

    files = Broken()
    journal = await FileJournal.open(tmp_path, small(), files)
    await journal.append(turn("e", 0))
    files.broken = True
    with pytest.raises(JournalUnavailable):
        await journal.append(turn("e", 1))
    files.broken = False
    await journal.append(turn("e", 2))
    assert numbers(await journal.read("e")) == [0, 2]
    await journal.close()


async def test_a_segment_that_could_not_be_removed_is_removed_by_the_next_deletion(tmp_path: Path) -> None:
    files = FaultyFiles()
    journal = await FileJournal.open(tmp_path, small(), files)
    for number in range(12):
        await journal.append(turn("e", number, items=3000))
    files.faults["remove"] = [fault()]
    with pytest.raises(JournalUnavailable):
        await journal.delete("e")
    assert await journal.read("e") == [], "the deletion itself is durable"
    segment_files(tmp_path)[0].unlink()  # as when a removal fails after the name is gone
    await journal.delete("e")
    assert len(segment_files(tmp_path)) == 1
    await journal.close()


async def test_while_summaries_cannot_be_written_everything_goes_on_and_the_next_start_reads_the_segments(
    tmp_path: Path,
) -> None:
    journal = await FileJournal.open(tmp_path, small())
    for number in range(1, 9):
        (tmp_path / f"segment-{number:010}.tsi.new").mkdir()
    for number in range(20):
        await journal.append(turn("e", number, items=3000))

    async def summary_failed() -> bool:
        return journal.stats.index_failures > 1

    await wait_until(summary_failed)
    assert numbers(await journal.read("e")) == list(range(20))
    await journal.close()
    assert summaries(tmp_path) == []
    journal = await FileJournal.open(tmp_path, small())
    assert numbers(await journal.read("e")) == list(range(20))
    await journal.close()
