"""What a journal promises while nothing goes wrong."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import threading
from pathlib import Path

import anyio
import numpy as np
import pytest
from journal_support import FaultyFiles, numbers, pieces, segment_files, small, state, turn

from turnstile_server.errors import JournalUnavailable, StartupError
from turnstile_server.journal import FileJournal, Journal, Record, RecordType
from waiting import wait_until

pytestmark = pytest.mark.anyio


async def test_an_append_that_returned_is_read_at_once_and_after_reopening(tmp_path: Path) -> None:
    journal: Journal = await FileJournal.open(tmp_path / "deep" / "data", small())
    for number in range(50):
        await journal.append(turn("e", number))
        assert numbers(await journal.read("e")) == list(range(number + 1))
    await journal.close()
    journal = await FileJournal.open(tmp_path / "deep" / "data", small())
    assert numbers(await journal.read("e")) == list(range(50))
    assert await journal.read("unknown") == []
    await journal.close()


async def test_records_of_an_episode_keep_the_order_of_the_calls_among_concurrent_appends(tmp_path: Path) -> None:
    journal = await FileJournal.open(tmp_path, small())
    appends = [journal.append(turn(f"e{number % 7}", number)) for number in range(700)]
    await asyncio.gather(*appends)
    for remainder in range(7):
        assert numbers(await journal.read(f"e{remainder}")) == list(range(remainder, 700, 7))
    await journal.close()


async def test_everything_queued_during_a_commit_shares_the_next_one(tmp_path: Path) -> None:
    files = FaultyFiles()
    journal = await FileJournal.open(tmp_path, small(group_window_s=0.05), files)
    await asyncio.gather(*(journal.append(turn("e", number)) for number in range(200)))
    assert journal.stats.appended_records == 200
    assert journal.stats.commits <= 2
    assert journal.stats.fsyncs == files.syncs
    await journal.close()


async def test_process_durability_appends_without_an_fsync_and_close_syncs(tmp_path: Path) -> None:
    files = FaultyFiles()
    journal = await FileJournal.open(tmp_path, small(durability="process"), files)
    await journal.append(turn("e", 0))
    syncs = files.syncs
    for number in range(1, 20):
        await journal.append(turn("e", number))
    assert files.syncs == syncs
    await journal.close()
    (segment,) = segment_files(tmp_path)
    assert files.synced[segment.name] == segment.stat().st_size


@pytest.mark.slow
async def test_an_append_is_answered_only_when_its_bytes_are_synced(tmp_path: Path) -> None:
    """A power cut right after any acknowledgement leaves the record: only synced bytes are kept."""
    files = FaultyFiles()
    journal = await FileJournal.open(tmp_path / "data", small(), files)
    for number in range(30):
        await journal.append(turn("e", number, items=2000))
        after_cut = tmp_path / f"cut-{number}"
        after_cut.mkdir()
        for segment in segment_files(tmp_path / "data"):
            (after_cut / segment.name).write_bytes(segment.read_bytes()[: files.synced[segment.name]])
        survivor = await FileJournal.open(after_cut, small())
        assert numbers(await survivor.read("e")) == list(range(number + 1))
        await survivor.close()
    await journal.close()


async def test_append_soon_keeps_its_place_and_is_stored_within_its_window(tmp_path: Path) -> None:
    journal = await FileJournal.open(tmp_path, small(soon_window_s=10))
    journal.append_soon(turn("e", 0))
    assert await journal.read("e") == []
    await journal.append(turn("e", 1))
    assert numbers(await journal.read("e")) == [0, 1]
    await journal.close()
    journal = await FileJournal.open(tmp_path, small(soon_window_s=0.01))
    journal.append_soon(turn("e", 2))

    async def stored() -> bool:
        return numbers(await journal.read("e")) == [0, 1, 2]

    await wait_until(stored)
    journal.append_soon(turn("e", 3))
    await journal.flush()
    assert numbers(await journal.read("e")) == [0, 1, 2, 3]
    await journal.close()


async def test_close_stores_what_is_queued_and_answers_everybody(tmp_path: Path) -> None:
    journal = await FileJournal.open(tmp_path, small(soon_window_s=10))
    pending = [asyncio.ensure_future(journal.append(turn("e", number))) for number in range(300)]
    await asyncio.sleep(0)
    journal.append_soon(turn("e", 300))
    await asyncio.gather(journal.close(), journal.close())
    await asyncio.gather(*pending)
    await journal.close()
    for refused in (journal.append(turn("e", 301)), journal.read("e"), journal.delete("e"), journal.flush()):
        with pytest.raises(JournalUnavailable, match="closed"):
            await refused
    journal.append_soon(turn("e", 302))  # logged and counted, never raised
    assert journal.stats.refused_records >= 2
    journal = await FileJournal.open(tmp_path, small())
    assert numbers(await journal.read("e")) == list(range(301))
    await journal.close()


async def test_a_cancelled_append_leaves_the_order_and_the_queue_intact(tmp_path: Path) -> None:
    journal = await FileJournal.open(tmp_path, small(group_window_s=0.02))
    tasks = [asyncio.ensure_future(journal.append(turn("e", number))) for number in range(20)]
    await asyncio.sleep(0)
    for task in tasks[::2]:
        task.cancel()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert [type(result) for result in results[::2]] == [asyncio.CancelledError] * 10
    assert all(type(size) is int for size in results[1::2])
    await journal.append(turn("e", 20))
    assert numbers(await journal.read("e")) == list(range(21))
    assert journal.stats.queued_bytes == 0
    await journal.close()


@pytest.mark.slow
async def test_a_full_queue_refuses_and_frees_itself(tmp_path: Path) -> None:
    journal = await FileJournal.open(tmp_path, small(max_queue_bytes=1 << 20, group_window_s=0.2))
    big = 60_000  # int32 items: four such records fit, five do not
    tasks = [asyncio.ensure_future(journal.append(turn("e", number, items=big))) for number in range(6)]
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(type(size) is int for size in results[:4])
    for result in results[4:]:
        assert isinstance(result, JournalUnavailable)
        assert "journal.max_queue_bytes" in result.message
        assert (result.status, result.retryable) == (503, True)
    await journal.append(turn("e", 4, items=big))
    assert numbers(await journal.read("e")) == [0, 1, 2, 3, 4]
    assert journal.stats.refused_records == 2
    await journal.close()


async def test_segments_rotate_at_their_size_and_a_larger_record_gets_its_own(tmp_path: Path) -> None:
    journal = await FileJournal.open(tmp_path, small())
    await asyncio.gather(*(journal.append(turn("e", number, items=5000)) for number in range(20)))
    await journal.append(turn("e", 20, items=50_000))
    await journal.append(turn("e", 21))
    assert numbers(await journal.read("e")) == list(range(22))
    await journal.close()
    sizes = [path.stat().st_size for path in segment_files(tmp_path)]
    assert len(sizes) >= 8
    assert sum(size > 1 << 16 for size in sizes) == 1
    assert all(not hasattr(piece, "end") for piece in pieces(tmp_path))


async def test_episodes_gives_the_last_state_of_each_oldest_first(tmp_path: Path) -> None:
    journal = await FileJournal.open(tmp_path, small())
    for name in ("b", "a", "c"):
        await journal.append(state(name, "queued"))
    await journal.append(turn("turns-only", 0))
    await journal.append(state("b", "completed", reward=1.0))
    await journal.delete("a")
    for _ in range(2):
        records = [record async for record in journal.episodes()]
        found = [(record.episode_id, record.meta["status"]) for record in records if record.damage is None]
        assert found == [("b", "completed"), ("c", "queued")]
        (lost,) = [record for record in records if record.damage is not None]
        assert (lost.episode_id, lost.meta) == ("turns-only", {}), (
            "no record of which anything is there is left out"
        )
        await journal.close()
        journal = await FileJournal.open(tmp_path, small())
    await journal.close()


async def test_large_arrays_of_every_kind_come_back(tmp_path: Path) -> None:
    arrays = {
        "ids": np.arange(1 << 17, dtype=np.int32),
        "logprobs": -np.random.default_rng(0).random(1 << 16).astype(np.float32),
        "mask": np.ones(0, np.uint8),
    }
    journal = await FileJournal.open(tmp_path, small(segment_bytes=1 << 22))
    await journal.append(Record(RecordType.TURN, "e", {}, arrays))
    (record,) = await journal.read("e")
    assert {name: array.tobytes() for name, array in record.arrays.items()} == {
        name: array.tobytes() for name, array in arrays.items()
    }
    await journal.close()


async def test_a_record_that_cannot_be_encoded_is_refused_and_harms_nothing(tmp_path: Path) -> None:
    journal = await FileJournal.open(tmp_path, small())
    with pytest.raises(TypeError):
        await journal.append(Record(RecordType.TURN, "e", {"not": object()}))
    with pytest.raises(ValueError, match="one dimension"):
        await journal.append(Record(RecordType.TURN, "e", {}, {"x": np.zeros((1, 1))}))
    await journal.append(turn("e", 0))
    assert numbers(await journal.read("e")) == [0]
    await journal.close()


@pytest.mark.slow
async def test_a_second_writer_is_refused_with_the_directory_and_the_pid_of_the_first(tmp_path: Path) -> None:
    journal = await FileJournal.open(tmp_path, small())
    with pytest.raises(StartupError) as refusal:
        await FileJournal.open(tmp_path, small())
    assert str(tmp_path) in refusal.value.message
    assert f"process {os.getpid()}." in refusal.value.message
    child = str(Path(__file__).with_name("journal_child.py"))
    with anyio.fail_after(60):
        other = await anyio.run_process([sys.executable, child, str(tmp_path), "power", "x", "1"], check=False)
    assert other.returncode == 2
    assert f"{tmp_path} is in use by process {os.getpid()}" in other.stderr.decode()
    await journal.append(turn("e", 0))
    await journal.close()
    journal = await FileJournal.open(tmp_path, small())
    assert numbers(await journal.read("e")) == [0]
    await journal.close()


async def test_a_directory_that_cannot_be_used_is_a_clear_start_up_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StartupError, match=r"data directory .*file cannot be used"):
        await FileJournal.open(tmp_path / "file", small())


async def test_an_abandoned_open_gives_the_directory_back(tmp_path: Path) -> None:
    opening = asyncio.ensure_future(FileJournal.open(tmp_path, small()))
    await asyncio.sleep(0)
    opening.cancel()
    with pytest.raises(asyncio.CancelledError):
        await opening

    async def reopened() -> FileJournal | None:
        with contextlib.suppress(StartupError):
            return await FileJournal.open(tmp_path, small())
        return None

    journal = await wait_until(reopened)
    assert journal is not None
    await journal.close()


async def test_close_leaves_no_thread_and_no_open_file(tmp_path: Path) -> None:
    others = set(threading.enumerate())

    def held() -> tuple[set[str], set[str]]:
        links = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
        targets = {os.readlink(link) for link in links if os.path.lexists(link)}
        threads = {thread.name for thread in threading.enumerate() if thread not in others}
        return (
            {target for target in targets if str(tmp_path) in target},
            {name for name in threads if name.startswith("journal-")},
        )

    journal = await FileJournal.open(tmp_path, small())
    await asyncio.gather(*(journal.append(turn("e", number, items=5000)) for number in range(20)))
    await journal.read("e")
    assert all(held())
    await journal.close()
    assert held() == (set(), set())
