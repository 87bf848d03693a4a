"""The bounds of the disk, on a real small file system: what they delete, what they spare, what they give back."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from journal_support import numbers, segment_files, small, state, turn

from real_disk import fill, tmpfs
from turnstile_server.journal import FileJournal, Record, RecordType
from turnstile_server.journal.entries import RecordLocation
from turnstile_server.journal.index import LastState
from turnstile_server.journal.retention import DiskBounds, make_room
from turnstile_server.settings import JournalSettings
from waiting import wait_until

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("way")]

MIB = 1 << 20
DISK = 16 * MIB


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    with tmpfs(tmp_path / "disk", "size=16m") as folder:
        yield folder


async def opened(disk: Path, **more: object) -> FileJournal:
    return await FileJournal.open(disk / "journal", small(check_interval_s=0.05, **more))


async def play(
    journal: FileJournal, name: str, *, ended: bool = True, fetched: bool = True, turns: int = 8
) -> None:
    await journal.append(state(name, "running"))
    for number in range(turns):
        await journal.append(turn(name, number, items=3000))
    if ended:
        await journal.append(state(name, "completed", timings={"created_at": 0.0, "ended_s": 1.0}))
    if fetched:
        await journal.append(Record(RecordType.EXPORTED, name, {}))


def taken(disk: Path) -> int:
    return sum(path.stat().st_blocks * 512 for path in segment_files(disk / "journal"))


async def names(journal: FileJournal) -> list[str]:
    return [record.episode_id async for record in journal.episodes()]


async def test_the_journal_stays_within_its_share_by_deleting_the_oldest_fetched_episodes(disk: Path) -> None:
    journal = await opened(disk, retention_share=0.25, retention_free_bytes=0)
    gone: list[str] = []
    await play(journal, "runs", ended=False, fetched=False)
    await play(journal, "unfetched", fetched=False)
    for number in range(120):
        await play(journal, f"e{number:03}")
        gone += await journal.apply_retention(0.0)
        assert taken(disk) <= 0.25 * DISK + 100_000
        assert journal.refusal is None
    assert gone == [f"e{number:03}" for number in range(len(gone))]
    assert 60 < len(gone) < 100
    left = await names(journal)
    assert left == ["runs", "unfetched", *[f"e{number:03}" for number in range(len(gone), 120)]]
    for name in ("runs", "unfetched"):
        assert numbers([r for r in await journal.read(name) if r.type == RecordType.TURN]) == list(range(8))
    await journal.close()
    journal = await opened(disk, retention_share=0.25, retention_free_bytes=0)
    assert await names(journal) == left
    await journal.close()


async def test_what_nobody_has_fetched_is_kept_and_new_episodes_are_refused_until_somebody_has(disk: Path) -> None:
    journal = await opened(disk, retention_share=0.25, retention_free_bytes=0)
    for number in range(50):
        await play(journal, f"e{number:03}", fetched=False)
    assert await journal.apply_retention(0.0) == []
    assert journal.refusal is not None
    assert "more than its share of the disk of 4 MiB (journal.retention_share)" in journal.refusal
    assert "50 ended episodes were not fetched yet" in journal.refusal
    await journal.append(turn("e049", 8))  # a running episode goes on
    for number in range(20):
        journal.append_soon(Record(RecordType.EXPORTED, f"e{number:03}", {}))
    await journal.flush()
    deleted = await journal.apply_retention(0.0)
    assert deleted == [f"e{number:03}" for number in range(len(deleted))]
    assert 0 < len(deleted) < 20
    assert journal.refusal is None
    await journal.close()


async def test_the_operator_may_let_the_bounds_delete_what_nobody_has_fetched(disk: Path) -> None:
    journal = await opened(disk, retention_share=0.25, retention_free_bytes=0, retention_spares_unexported=False)
    await play(journal, "runs", ended=False, fetched=False)
    for number in range(50):
        await play(journal, f"e{number:03}", fetched=False)
    assert len(await journal.apply_retention(0.0)) > 5
    assert journal.refusal is None
    assert "runs" in await names(journal)
    await journal.close()


async def test_what_is_fresh_goes_by_no_bound_of_size(disk: Path) -> None:
    journal = await opened(disk, retention_share=0.25, retention_free_bytes=0)
    for number in range(50):
        await play(journal, f"e{number:03}")
    everything = {f"e{number:03}" for number in range(50)}
    assert await journal.apply_retention(0.0, (), everything) == []
    assert journal.refusal is not None
    assert "0 ended episodes were not fetched yet, 50 ended or were fetched a moment ago" in journal.refusal
    deleted = await journal.apply_retention(0.0, (), {"e000", "e002"})
    assert deleted[:2] == ["e001", "e003"]
    assert journal.refusal is None
    await journal.close()


async def test_when_others_fill_the_disk_fetched_episodes_make_room(disk: Path) -> None:
    journal = await opened(disk, retention_share=0, retention_free_bytes=2 * MIB)
    for number in range(40):
        await play(journal, f"e{number:03}", fetched=number != 0)
    assert await journal.apply_retention(0.0) == []
    ballast = fill(disk, leave=MIB)
    deleted = await journal.apply_retention(0.0)
    assert deleted[0] == "e001"
    status = os.statvfs(disk)
    assert status.f_bavail * status.f_frsize > 1.5 * MIB
    ballast.unlink()
    assert await journal.apply_retention(0.0) == []
    await journal.close()


async def test_off_means_off(disk: Path) -> None:
    for off in (0, None):
        journal = await opened(disk, retention_share=off, retention_free_bytes=off)
        await play(journal, f"e{off}", turns=200)
        assert await journal.apply_retention(1e12) == []
        assert "no bound of the disk is set" in await journal.told_at_start()
        await journal.close()


async def test_the_start_tells_the_bounds(disk: Path) -> None:
    journal = await opened(disk, retention_share=0.5, retention_free_bytes=1 << 30)
    told = await journal.told_at_start()
    assert told == (
        f"the journal in {disk / 'journal'} takes 0.0 MiB of 16.0 MiB; over 8.0 MiB or with less than 1.6 MiB "
        "free the oldest ended episodes that a trainer has fetched are deleted (journal.retention_*)"
    )
    await journal.close()


@pytest.mark.slow
async def test_a_long_episode_keeps_no_segment_of_others(disk: Path) -> None:
    """Its turns lie in every segment; what lies between them was deleted."""
    journal = await opened(disk, retention_share=0, retention_free_bytes=0)
    for number in range(60):
        await journal.append(turn("long", number))
        await play(journal, f"e{number}")
    before = taken(disk)
    for number in range(60):
        await journal.delete(f"e{number}")
    assert taken(disk) < before / 8
    assert numbers(await journal.read("long")) == list(range(60))
    await journal.close()
    journal = await opened(disk)
    assert numbers(await journal.read("long")) == list(range(60))
    assert await names(journal) == ["long"]
    await journal.close()


@pytest.mark.thorough
@pytest.mark.slow
async def test_the_disk_fills_and_is_freed_again_and_again(disk: Path) -> None:
    """A loop of filling it to the brim and deleting all but the last: nothing adds up."""
    journal = await opened(disk, retention_share=None, retention_free_bytes=None)
    kept: list[str] = []
    for life in range(4):
        fresh: list[str] = []
        try:
            for number in range(1000):
                fresh.append(f"{life}-{number}")
                await play(journal, fresh[-1])
        except Exception:  # noqa: BLE001 - it is full
            assert len(fresh) > 80
        for name in [*kept, *fresh[:-1]]:
            await journal.delete(name)
        kept = [fresh[-1]]

        async def takes_turns() -> bool:
            return journal.refusal is None

        await wait_until(takes_turns)
        assert await names(journal) == kept
    assert taken(disk) < MIB
    await journal.close()


def state_of(name: str, *, ended: bool = True, exported: bool = True) -> LastState:
    return LastState(name, RecordLocation(0, 0, 1), 1.0 if ended else None, exported)


def test_room_is_made_of_the_oldest_that_may_go() -> None:
    states = [
        state_of("runs", ended=False),
        state_of("a"),
        state_of("new", exported=False),
        state_of("b"),
        state_of("c"),
    ]
    sizes = dict.fromkeys(["runs", "a", "new", "b", "c"], 10)
    room = make_room(states, sizes, 15, spare_unexported=True)
    assert (room.delete, room.short, room.waiting) == (["a", "b"], 0, 1)
    room = make_room(states, sizes, 100, spare_unexported=True)
    assert (room.delete, room.short) == (["a", "b", "c"], 70)
    assert make_room(states, sizes, 15, spare_unexported=False).delete == ["a", "new"]


def test_bounds_in_bytes() -> None:
    gib = 1 << 30
    bounds = DiskBounds.of(JournalSettings(), 100 * gib)
    assert (bounds.most, bounds.free) == (50 * gib, gib)
    assert bounds.excess(10 * gib, 5 * gib) == 0
    assert bounds.excess(51 * gib, 5 * gib) == gib
    assert bounds.excess(10 * gib, 0) == gib
    assert bounds.excess(gib // 4, 0) == gib // 4, "what others take cannot be given back"
    small_disk = DiskBounds.of(JournalSettings(), 4 * gib)
    assert small_disk.free == 4 * gib // 10
    off = DiskBounds.of(JournalSettings(retention_share=0, retention_free_bytes=None), gib)
    assert (off.most, off.free, off.excess(gib, 0)) == (None, None, 0)
