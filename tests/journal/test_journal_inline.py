"""``durability = process``: who writes a record, the event loop or the journal's thread, and that its place is the
same. What happens on failing disks is in the other suites, which play both ways."""

from __future__ import annotations

import asyncio
import errno
import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from journal_support import FaultyFiles, numbers, segment_files, small, turn

from turnstile_server.errors import JournalUnavailable
from turnstile_server.journal import FileJournal
from waiting import wait_until

pytestmark = pytest.mark.anyio

LOOP, THREAD = "event loop", "journal-writer"


class Witness(FaultyFiles):
    """``writers``: who made each write. ``slow_s``: how long the next write takes. ``gate``: the thread's writes
    wait for it."""

    def __init__(self) -> None:
        super().__init__()
        self.writers: list[str] = []
        self.slow_s = 0.0
        self.gate: threading.Event | None = None
        self.at_gate = threading.Event()
        self._loop = threading.current_thread()

    def write(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        own = threading.current_thread() is self._loop
        self.writers.append(LOOP if own else threading.current_thread().name)
        slow_s, self.slow_s = self.slow_s, 0.0
        time.sleep(slow_s)
        if self.gate is not None and not own:
            self.at_gate.set()
            self.gate.wait(20)
        return super().write(fd, buffers, offset)


async def opened(directory: Path, files: Witness, **settings: Any) -> FileJournal:
    """A journal whose first segment is there; what was written for that is forgotten. No write is slow by
    itself."""
    wanted = {"durability": "process", "inline_stall_s": 10, "check_interval_s": 3600, **settings}
    journal = await FileJournal.open(directory, small(**wanted), files)
    await journal.append(turn("e", 0))
    await rested(journal)
    files.writers.clear()
    return journal


async def rested(journal: FileJournal) -> None:
    """The thread waits for work. It answers a barrier before it rests, so it is asked until it does."""

    def at_work() -> bool:
        with journal._commit._changed:  # it says what it does only while it holds the lock
            return journal._commit._busy

    await wait_until(lambda: not at_work())


async def test_the_event_loop_writes_small_records_and_the_thread_large_ones(tmp_path: Path) -> None:
    files = Witness()
    journal = await opened(tmp_path, files, inline_bytes=4096)
    await journal.append(turn("e", 1))
    await journal.append(turn("e", 2, items=2000))
    await rested(journal)
    await journal.append(turn("e", 3))
    assert files.writers == [LOOP, THREAD, LOOP]
    assert journal.stats.inline_records == 2
    assert numbers(await journal.read("e")) == [0, 1, 2, 3]
    await journal.close()
    journal = await FileJournal.open(tmp_path, small())
    assert numbers(await journal.read("e")) == [0, 1, 2, 3]
    await journal.close()


@pytest.mark.parametrize("settings", [{"durability": "power"}, {"inline_bytes": 0}, {"group_window_s": 0.001}])
async def test_where_an_fsync_or_a_group_is_asked_for_the_thread_writes_all(
    tmp_path: Path, settings: dict[str, Any]
) -> None:
    files = Witness()
    journal = await opened(tmp_path, files, **settings)
    for number in range(1, 5):
        await journal.append(turn("e", number))
    assert set(files.writers) == {THREAD}
    await journal.close()


async def test_records_that_nothing_waits_for_are_written_before_the_next_one(tmp_path: Path) -> None:
    files = Witness()
    journal = await opened(tmp_path, files, soon_window_s=10)
    journal.append_soon(turn("e", 1))
    journal.append_soon(turn("e", 2))
    assert files.writers == []
    await journal.append(turn("e", 3))
    assert files.writers == [LOOP], "all three in one write"
    assert numbers(await journal.read("e")) == [0, 1, 2, 3]
    assert journal.stats.queued_bytes == 0
    await journal.close()


async def test_records_that_nothing_waits_for_are_written_in_time_although_nothing_follows(tmp_path: Path) -> None:
    files = Witness()
    journal = await opened(tmp_path, files, soon_window_s=0.02, index_lag_s=60)
    journal.append_soon(turn("e", 1))
    await wait_until(lambda: files.writers)
    assert files.writers == [THREAD]
    await journal.close()


async def test_while_the_thread_writes_everything_queues_behind_it(tmp_path: Path) -> None:
    files = Witness()
    journal = await opened(tmp_path, files, inline_bytes=4096)
    files.gate = threading.Event()
    appends = [asyncio.ensure_future(journal.append(turn("e", 1, items=2000)))]
    await asyncio.to_thread(files.at_gate.wait, 20)
    appends += [asyncio.ensure_future(journal.append(turn("e", number))) for number in range(2, 6)]
    for _ in range(20):
        await asyncio.sleep(0)
    assert not any(append.done() for append in appends)
    files.gate.set()
    await asyncio.gather(*appends)
    assert set(files.writers) == {THREAD}
    assert numbers(await journal.read("e")) == list(range(6))
    await journal.close()


async def test_after_a_slow_write_the_thread_writes_for_a_while(tmp_path: Path) -> None:
    files = Witness()
    journal = await opened(tmp_path, files, inline_stall_s=0.01, inline_pause_s=3600)
    files.slow_s = 0.03
    await journal.append(turn("e", 1))
    await journal.append(turn("e", 2))
    assert files.writers == [LOOP, THREAD]
    assert journal.stats.inline_stalls == 1
    await journal.close()


async def test_after_the_pause_the_event_loop_writes_again(tmp_path: Path) -> None:
    files = Witness()
    journal = await opened(tmp_path, files, inline_stall_s=1e-9, inline_pause_s=0)
    for number in range(1, 4):
        await journal.append(turn("e", number))
    assert files.writers == [LOOP] * 3
    assert journal.stats.inline_stalls == 3
    await journal.close()


async def test_a_new_segment_is_begun_by_the_thread_because_that_takes_an_fsync(tmp_path: Path) -> None:
    files = Witness()
    journal = await opened(tmp_path, files)
    while len(segment_files(tmp_path)) == 1:
        await rested(journal)
        before, syncs = len(files.writers), files.syncs
        await journal.append(turn("e", len(numbers(await journal.read("e"))), items=3000))
        by_loop = files.writers[before:] == [LOOP]
        assert by_loop == (files.syncs == syncs)
    assert LOOP in files.writers
    await journal.close()


async def test_a_record_that_the_disk_refused_the_event_loop_sends_the_next_ones_to_the_thread(
    tmp_path: Path,
) -> None:
    files = Witness()
    journal = await opened(tmp_path, files)
    files.faults["write"] = [OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))]
    with pytest.raises(JournalUnavailable, match="No space left"):
        await journal.append(turn("e", 1))
    assert journal.refusal is not None
    await journal.append(turn("e", 2))
    assert journal.refusal is None
    await rested(journal)
    await journal.append(turn("e", 3))
    assert files.writers == [LOOP, THREAD, LOOP]
    assert (journal.stats.refused_records, journal.stats.queued_bytes) == (1, 0)
    assert numbers(await journal.read("e")) == [0, 2, 3]
    await journal.close()


async def test_what_the_event_loop_wrote_is_indexed_in_time(tmp_path: Path) -> None:
    journal = await opened(tmp_path, Witness(), index_lag_s=0.01)
    await journal.append(turn("e", 1))
    await wait_until(lambda: not journal._unindexed.snapshot())
    assert numbers(await journal.read("e")) == [0, 1]
    await journal.close()


async def test_a_closed_journal_refuses_small_records_too(tmp_path: Path) -> None:
    journal = await opened(tmp_path, Witness())
    await journal.close()
    with pytest.raises(JournalUnavailable, match="closed"):
        await journal.append(turn("e", 1))
