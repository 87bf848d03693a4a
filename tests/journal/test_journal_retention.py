"""Deleting: at once for readers, for ever through any rebuild, and the disk gets its bytes back."""

from __future__ import annotations

from pathlib import Path

import pytest
from journal_support import drop_index, numbers, segment_files, small, state, turn

from turnstile_server.journal import FileJournal
from turnstile_server.journal.entries import UNKNOWN_END, RecordLocation
from turnstile_server.journal.index import LastState
from turnstile_server.journal.retention import DAY_S, expired

pytestmark = pytest.mark.anyio


async def lost_index(journal: FileJournal, directory: Path, **settings: object) -> FileJournal:
    await journal.close()
    drop_index(directory)
    return await FileJournal.open(directory, small(**settings))


async def test_a_deleted_episode_is_gone_for_good_and_others_are_not(tmp_path: Path) -> None:
    journal = await FileJournal.open(tmp_path, small())
    for name in ("a", "b"):
        await journal.append(state(name, "completed"))
        await journal.append(turn(name, 0))
    await journal.delete("a")
    await journal.delete("a")
    await journal.delete("never-heard-of")
    for _ in range(3):
        assert await journal.read("a") == []
        assert len(await journal.read("b")) == 2
        assert [record.episode_id async for record in journal.episodes()] == ["b"]
        journal = await lost_index(journal, tmp_path)
    await journal.close()


async def test_deleting_sees_records_that_nobody_waited_for(tmp_path: Path) -> None:
    journal = await FileJournal.open(tmp_path, small(soon_window_s=10))
    journal.append_soon(turn("a", 0))
    await journal.delete("a")
    await journal.flush()
    assert await journal.read("a") == []
    await journal.close()


async def test_an_id_used_again_after_its_deletion_starts_anew(tmp_path: Path) -> None:
    journal = await FileJournal.open(tmp_path, small())
    await journal.append(turn("a", 0))
    await journal.delete("a")
    await journal.append(turn("a", 1))
    for _ in range(2):
        assert numbers(await journal.read("a")) == [1]
        journal = await lost_index(journal, tmp_path)
    await journal.close()


async def test_segments_go_when_all_in_them_is_deleted_and_never_before(tmp_path: Path) -> None:
    journal = await FileJournal.open(tmp_path, small())
    for number in range(20):
        await journal.append(turn("a", number, items=3000))
    await journal.append(turn("keeper", 0))
    for number in range(20):
        await journal.append(turn("a", number, items=3000))
    count = len(segment_files(tmp_path))
    keeper = segment_files(tmp_path)[3:5]
    await journal.delete("a")
    left = segment_files(tmp_path)
    assert len(left) == 2
    assert left[0] in keeper
    assert left[0].stat().st_size < 500, "the keeper alone is left in it"
    assert journal.stats.segments_removed == count - 1
    assert journal.stats.segments_compacted == 1
    for _ in range(2):
        assert numbers(await journal.read("keeper")) == [0]
        assert await journal.read("a") == []
        journal = await lost_index(journal, tmp_path)
    await journal.close()


async def test_the_dead_stay_dead_when_the_segment_of_their_tombstone_goes(tmp_path: Path) -> None:
    journal = await FileJournal.open(tmp_path, small())
    await journal.append(turn("keeper", 0))
    await journal.append(turn("victim", 0))
    for number in range(4):
        await journal.append(turn("filler", number, items=6000))
    await journal.delete("victim")
    with_tombstone = segment_files(tmp_path)[-1]
    for number in range(4, 12):
        await journal.append(turn("filler", number, items=6000))
    await journal.delete("filler")
    assert not with_tombstone.exists()
    for _ in range(2):
        assert await journal.read("victim") == []
        assert numbers(await journal.read("keeper")) == [0]
        journal = await lost_index(journal, tmp_path)
    await journal.close()


async def test_a_tombstone_outlives_its_own_segment_while_its_dead_lie_elsewhere(tmp_path: Path) -> None:
    """Segment 1: the victim and a keeper. Its tombstone's segment dies; the victim must not come back."""
    journal = await FileJournal.open(tmp_path, small())
    await journal.append(turn("keeper", 0))
    await journal.append(turn("victim", 0))
    for number in range(4):
        await journal.append(turn("filler", number, items=6000))
    await journal.delete("victim")
    tombstone_segment = segment_files(tmp_path)[-1]
    await journal.append(turn("victim", 1))  # the id lives again: the carried tombstone must not kill this
    for number in range(4, 12):
        await journal.append(turn("filler", number, items=6000))
    await journal.append(turn("late-keeper", 0))
    await journal.delete("victim")
    await journal.append(turn("victim", 2))
    await journal.delete("filler")
    for number in range(12, 20):
        await journal.append(turn("filler", number, items=6000))
    await journal.delete("filler")
    assert not tombstone_segment.exists()
    for _ in range(3):
        assert numbers(await journal.read("victim")) == [2]
        assert numbers(await journal.read("keeper")) == [0]
        assert numbers(await journal.read("late-keeper")) == [0]
        assert await journal.read("filler") == []
        journal = await lost_index(journal, tmp_path)
    await journal.close()


async def test_retention_by_age_deletes_what_ended_before_the_deadline(tmp_path: Path) -> None:
    journal = await FileJournal.open(tmp_path, small(retention_days=2))
    day = DAY_S
    for name, status, created, ended in (
        ("old", "completed", 0.0, day),
        ("old-but-running", "running", 0.0, None),
        ("ended-late", "failed", 0.0, 4.5 * day),
        ("new", "timed_out", 4 * day, 10.0),
    ):
        await journal.append(state(name, status, timings={"created_at": created, "ended_s": ended}))
        await journal.append(turn(name, 0))
    assert await journal.apply_retention(5 * day) == ["old"]
    assert await journal.apply_retention(5 * day) == []
    assert await journal.read("old") == []
    kept = [record.episode_id async for record in journal.episodes()]
    assert kept == ["old-but-running", "ended-late", "new"]
    journal = await lost_index(journal, tmp_path, retention_days=2)
    assert await journal.apply_retention(6.1 * day) == ["new"]
    assert await journal.apply_retention(7 * day) == ["ended-late"]
    await journal.close()


async def test_retention_by_size_frees_the_disk_oldest_first_and_spares_what_runs(tmp_path: Path) -> None:
    journal = await FileJournal.open(tmp_path, small(retention_bytes=1 << 20))
    for number in range(60):
        name = f"e{number:02}"
        await journal.append(turn(name, number, items=12_000))
        status = "running" if number == 0 else "completed"
        await journal.append(state(name, status, timings={"created_at": float(number), "ended_s": 1.0}))
    deleted = await journal.apply_retention(0.0)
    assert deleted == [f"e{number:02}" for number in range(1, len(deleted) + 1)]
    assert 30 < len(deleted) < 45
    on_disk = sum(path.stat().st_size for path in segment_files(tmp_path))
    assert on_disk < (1 << 20) + 3 * (1 << 16)
    assert numbers([record for record in await journal.read("e00") if record.arrays]) == [0]
    await journal.close()


async def test_without_retention_settings_nothing_is_deleted(tmp_path: Path) -> None:
    journal = await FileJournal.open(tmp_path, small())
    await journal.append(state("a", "completed", timings={"created_at": 0.0, "ended_s": 0.0}))
    assert await journal.apply_retention(1e12) == []
    assert len(await journal.read("a")) == 1
    await journal.close()


def _state(name: str, ended_at: float | None) -> LastState:
    return LastState(name, RecordLocation(0, 0, 1), ended_at)


def test_age_and_size_add_up_and_unknown_ages_go_only_by_size() -> None:
    states = [_state("unknown", UNKNOWN_END), _state("old", 0.0), _state("runs", None), _state("new", 9 * DAY_S)]
    sizes = {"unknown": 10, "old": 10, "runs": 10, "new": 10, "turns-without-state": 10}
    now = 10 * DAY_S
    assert expired(states, sizes, now, 5, None) == ["old"]
    assert expired(states, sizes, now, None, 45) == ["unknown"]
    assert expired(states, sizes, now, 5, 30) == ["old", "unknown"]
    assert expired(states, sizes, now, None, 0) == ["unknown", "old", "new"]
    assert expired(states, sizes, now, None, None) == []
    fresh = {"unknown", "old"}
    assert expired(states, sizes, now, None, 0, fresh) == ["new"], "no bound of size"
    assert expired(states, sizes, now, 5, None, fresh) == ["old"], "the bound of age does"
