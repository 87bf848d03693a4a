"""A disk that is full, read-only or broken, for real: the journal opens, reads, deletes, refuses, and recovers."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
from journal_support import numbers, segment_files, small, state, summaries, turn

from real_disk import ext4, fill, remount, take_inodes, tmpfs
from turnstile_server.errors import JournalUnavailable
from turnstile_server.journal import FileJournal, RecordType
from waiting import wait_until

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("way")]

Disk = Callable[[Path], AbstractContextManager[Path]]
DISKS: list[Disk] = [lambda at: tmpfs(at, "size=6m,nr_inodes=200"), lambda at: ext4(at, 8 << 20)]


@pytest.fixture(params=DISKS, ids=["tmpfs", "ext4"])
def disk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    with request.param(tmp_path / "disk") as folder:
        yield folder


def settings(**more: object) -> object:
    return small(check_interval_s=0.05, retention_share=None, retention_free_bytes=None, **more)


async def opened(directory: Path, **more: object) -> FileJournal:
    return await FileJournal.open(directory, settings(**more))  # type: ignore[arg-type]


async def filled(disk: Path, episodes: int = 8) -> list[str]:
    """A closed journal of a few segments with ended episodes."""
    journal = await opened(disk / "journal")
    names = [f"e{number}" for number in range(episodes)]
    for name in names:
        await journal.append(state(name, "running"))
        for number in range(4):
            await journal.append(turn(name, number, items=3000))
        await journal.append(state(name, "completed"))
    await journal.close()
    return names


async def append_many(journal: FileJournal, name: str, acknowledged: list[int] | None = None) -> None:
    for number in range(1000):
        await journal.append(turn(name, number, items=3000))
        if acknowledged is not None:
            acknowledged.append(number)


async def turns_of(journal: FileJournal, name: str) -> list[int]:
    return numbers([record for record in await journal.read(name) if record.type == RecordType.TURN])


async def listed(journal: FileJournal) -> list[str]:
    return [record.episode_id async for record in journal.episodes()]


async def test_a_journal_opens_on_a_disk_without_a_byte_and_reads_deletes_and_recovers(disk: Path) -> None:
    names = await filled(disk)
    fill(disk)
    take_inodes(disk)
    journal = await opened(disk / "journal")
    assert await listed(journal) == names
    for name in names:
        assert await turns_of(journal, name) == list(range(4))
    for _ in range(3):
        with pytest.raises(JournalUnavailable, match="No space left on device"):
            await append_many(journal, "new")  # the last block of a file may have room for some

    async def told() -> bool:
        return journal.refusal is not None and "No space left" in journal.refusal

    await wait_until(told)
    for name in names[:4]:
        await journal.delete(name)

    async def recovered() -> bool:
        return journal.refusal is None

    await wait_until(recovered)
    await journal.append(turn("after", 0, items=3000))
    await journal.close()
    journal = await opened(disk / "journal")
    assert await listed(journal) == [*names[4:], *await orphans(journal, names)]
    assert await turns_of(journal, "after") == [0]
    await journal.close()


async def orphans(journal: FileJournal, names: list[str]) -> list[str]:
    return [record.episode_id async for record in journal.episodes() if record.episode_id not in names]


@pytest.mark.slow
async def test_a_full_disk_stays_refused_keeps_its_reserve_and_is_told_until_there_is_room(
    disk: Path, caplog: pytest.LogCaptureFixture
) -> None:
    journal = await opened(disk / "journal")
    reserve = disk / "journal" / "reserve"

    async def held() -> bool:
        return reserve.exists()

    await wait_until(held)
    await journal.append(turn("e", 0))
    ballast = fill(disk)
    before = reserve.stat()
    stored = 0
    for _ in range(20):
        try:
            await journal.append(turn("e", 1 + stored, items=3000))
            stored += 1
        except JournalUnavailable:
            assert journal.refusal is not None
            break
    for number in range(10):  # what the disk has no room for now it had none for a moment ago
        await asyncio.sleep(0.06)
        assert journal.refusal is not None
        with pytest.raises(JournalUnavailable, match="No space left on device"):
            await journal.append(turn("big", number, items=30_000))
    assert "takes turns again" not in caplog.text
    assert (reserve.stat().st_ino, reserve.stat().st_size) == (before.st_ino, before.st_size)
    await journal.delete("e")
    ballast.unlink()

    async def recovered() -> bool:
        return journal.refusal is None and reserve.exists() and not (disk / "journal" / "probe").exists()

    await wait_until(recovered)
    await journal.append(turn("big", 0, items=30_000))
    await journal.close()


async def test_deletions_of_everything_empty_the_disk_even_from_the_segment_that_is_appended_to(
    disk: Path,
) -> None:
    journal = await opened(disk / "journal", segment_bytes=64 << 20)
    for name in ("a", "b", "c"):
        for number in range(30):
            await journal.append(turn(name, number, items=3000))
        await journal.append(state(name, "completed"))
    taken = sum(path.stat().st_size for path in segment_files(disk / "journal"))
    fill(disk)
    for name in ("a", "b", "c"):
        await journal.delete(name)
    left = sum(path.stat().st_size for path in segment_files(disk / "journal"))
    assert left < 1 << 16 < taken
    await journal.append(turn("next", 0, items=60_000))
    await journal.close()


async def test_a_disk_that_another_fills_while_nobody_appends_is_told_before_an_append_and_recovers(
    disk: Path,
) -> None:
    journal = await opened(disk / "journal", min_free_bytes=1 << 20)
    await journal.append(turn("e", 0))
    ballast = fill(disk, leave=1 << 19)

    async def told() -> bool:
        return journal.refusal is not None and "are to stay free" in journal.refusal

    await wait_until(told)
    with pytest.raises(JournalUnavailable):
        await journal.append(turn("e", 1))
    ballast.unlink()

    async def recovered() -> bool:
        return journal.refusal is None

    await wait_until(recovered)
    await journal.append(turn("e", 2))
    assert await turns_of(journal, "e") == [0, 2]
    await journal.close()


async def test_a_disk_without_inodes_refuses_new_segments_and_lets_episodes_be_deleted(disk: Path) -> None:
    names = await filled(disk)
    made = take_inodes(disk)
    journal = await opened(disk / "journal")
    acknowledged: list[int] = []
    with pytest.raises(JournalUnavailable):
        await append_many(journal, "new", acknowledged)
    assert len(acknowledged) < 10
    assert await turns_of(journal, "new") == acknowledged
    for name in names:
        await journal.delete(name)
    await journal.append(turn("new", 5000, items=3000))
    assert await turns_of(journal, "new") == [*acknowledged, 5000]
    await journal.close()
    for path in made:
        path.unlink()


@pytest.mark.slow
async def test_a_disk_that_becomes_read_only_refuses_reads_on_and_recovers(tmp_path: Path) -> None:
    with ext4(tmp_path / "disk", 8 << 20) as disk:
        names = await filled(disk)
        journal = await opened(disk / "journal")
        await journal.append(turn("e", 0))
        await journal.close()
        remount(disk, "ro")
        journal = await opened(disk / "journal")  # and it starts there
        assert await listed(journal) == [*names, "e"]
        with pytest.raises(JournalUnavailable, match="Read-only"):
            await journal.append(turn("e", 1))
        with pytest.raises(JournalUnavailable):
            await journal.delete(names[0])
        assert journal.refusal is not None
        assert await turns_of(journal, names[0]) == list(range(4))
        remount(disk, "rw")

        async def recovered() -> bool:
            return journal.refusal is None

        await wait_until(recovered)
        await journal.append(turn("e", 2))
        await journal.delete(names[0])
        await journal.close()
        journal = await opened(disk / "journal")
        assert await turns_of(journal, "e") == [0, 2]
        assert names[0] not in await listed(journal)
        await journal.close()


@pytest.mark.slow
@pytest.mark.parametrize("leave", [0, 4096, 12_000, 40_000, 120_000])
async def test_whatever_room_is_left_each_append_is_answered_truly(disk: Path, leave: int) -> None:
    names = await filled(disk, episodes=3)
    fill(disk, leave)
    journal = await opened(disk / "journal")
    stored: list[int] = []
    for number in range(60):
        try:
            await journal.append(turn("e", number, items=1 + 700 * (number % 5)))
            stored.append(number)
        except JournalUnavailable:
            if number % 7 == 0 and names:
                await journal.delete(names.pop())
    await journal.close()
    journal = await opened(disk / "journal")
    assert await turns_of(journal, "e") == stored
    assert set(await listed(journal)) == {*names, *(["e"] if stored else [])}
    assert journal.stats.corrupt_records == 0
    await journal.close()


async def test_without_a_reserve_deletions_take_the_room_of_the_summaries(disk: Path) -> None:
    names = await filled(disk)
    (disk / "journal" / "reserve").unlink()
    fill(disk)
    journal = await opened(disk / "journal", reserve_bytes=0)
    assert summaries(disk / "journal")
    for name in names:
        await journal.delete(name)
    assert await listed(journal) == []
    await journal.close()


async def test_the_lock_of_a_full_disk_keeps_a_second_server_out(disk: Path) -> None:
    await filled(disk)
    fill(disk)
    take_inodes(disk)
    journal = await opened(disk / "journal")
    with pytest.raises(Exception, match="is in use by process"):
        await opened(disk / "journal")
    await journal.close()


@pytest.mark.slow
async def test_a_writer_that_is_stopped_for_a_while_loses_nothing(tmp_path: Path) -> None:
    """SIGSTOP between any two steps, often; a full disk beside it."""
    with tmpfs(tmp_path / "disk", "size=4m") as disk:
        process = await asyncio.create_subprocess_exec(
            *_child(disk / "journal"), stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL
        )
        assert process.stdout is not None
        stored: dict[str, list[int]] = {}

        async def read() -> None:
            assert process.stdout is not None
            async for line in process.stdout:
                name, number = line.decode().split()
                stored.setdefault(name, []).append(int(number))

        await process.stdout.readline()  # it is ready
        reading = asyncio.create_task(read())
        for _ in range(25):
            await asyncio.sleep(0.02)
            with contextlib.suppress(ProcessLookupError):  # the disk is full, which ends it
                process.send_signal(signal.SIGSTOP)
                await asyncio.sleep(0.01)
                process.send_signal(signal.SIGCONT)
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
        await reading
        assert stored
        journal = await opened(disk / "journal")
        for name, told in stored.items():
            assert set(told) <= set(await turns_of(journal, name))
        await journal.close()


def _child(directory: Path) -> list[str]:
    import sys

    return [sys.executable, str(Path(__file__).with_name("journal_child.py")), str(directory), "power", "s", "3"]
