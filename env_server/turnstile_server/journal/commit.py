"""Group commit: many callers in the event loop, one writer thread, one write and one fdatasync for all that wait.

What must hold: records reach the writer in the order of ``submit``; a caller is answered after its record was
stored or refused, never before; the queue is bounded in bytes; when the thread ends, every caller has been
answered; the writer is used by one thread at a time (``_busy`` and the lock say whose it is).

Where no fsync is asked for (``durability = process``), a small record is written by the event loop itself while
the thread rests: a write into the page cache takes microseconds, two changes of thread take ten times that. A
write that took longer than ``inline_stall_s`` leaves the records to the thread for ``inline_pause_s``. Under
``power`` the loop never waits for the disk.

It is written on asyncio, whose events cost less to make than anyio's: there is one for every record.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from turnstile_server.errors import JournalUnavailable
from turnstile_server.journal.bounds import JournalBounds
from turnstile_server.journal.entries import Journaled
from turnstile_server.journal.reserve import Reserve
from turnstile_server.journal.segments import EncodedRecord
from turnstile_server.journal.stats import JournalStats
from turnstile_server.journal.writer import SegmentWriter, is_tombstone
from turnstile_server.settings import JournalSettings
from turnstile_server.threads import LoopCaller

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class QueuedRecord:
    """A record on its way to the disk.

    ``encoded`` None: a barrier, which is answered after all records before it; ``rotate``: and after a new segment
    was begun. ``due`` None: a caller waits; else the monotonic time by which the record must be written.
    """

    encoded: EncodedRecord | None
    due: float | None = None
    rotate: bool = False
    error: Exception | None = None
    answered: bool = False
    """It was stored or refused, and the event loop knows."""
    size: int = field(init=False)
    """Bytes on disk; 0 for a barrier."""
    _waits: asyncio.Event | None = None

    def __post_init__(self) -> None:
        self.size = self.encoded.size if self.encoded is not None else 0

    def answer(self) -> None:
        """In the event loop."""
        self.answered = True
        if self._waits is not None:
            self._waits.set()

    async def wait(self) -> None:
        """Returns when the record was stored; cancelling the caller does not take it back. As ``check``."""
        if not self.answered:
            self._waits = self._waits or asyncio.Event()
            await self._waits.wait()
        self.check()

    def check(self) -> None:
        """Raises JournalUnavailable for an answered record that was refused."""
        if self.error is not None:
            raise JournalUnavailable(
                f"The record was not stored: {self.error}. Free space or repair the disk that holds the data "
                "directory; the call may be sent again."
            )


class GroupCommit:
    """Made and used in the event loop; owns the writer thread from ``start`` to the end of ``close``."""

    def __init__(
        self,
        writer: SegmentWriter,
        settings: JournalSettings,
        stats: JournalStats,
        *,
        reserve: Reserve,
        publish: Callable[[Sequence[Journaled]], None],
        index: Callable[[], None],
    ) -> None:
        self._bounds = settings.bounds_of(JournalBounds)
        own = settings.durability == "process" and not self._bounds.group_window_s
        self._inline_bytes = self._bounds.inline_bytes if own else 0
        """Records up to this size may be written in the event loop."""
        self._inline_from = 0.0
        """When the event loop may write again, after a write that took too long (``perf_counter``)."""
        self._writer = writer
        self._settings = settings
        self._stats = stats
        self._reserve = reserve
        self.trouble: str | None = None
        """The reason that the disk takes no turns now; None where it does. Set in the thread, read anywhere."""
        self._refused_bytes = 0
        """The smallest record that the disk refused since it last took one."""
        self._check_due = time.monotonic()
        self._publish = publish
        """Called in the thread, before the callers are answered."""
        self._index = index
        """Called in the thread, ``index_lag_s`` after the first record that was published since the last time."""
        self._index_due: float | None = None
        self._loop = LoopCaller()
        self._changed = threading.Condition()
        self._queue: deque[QueuedRecord] = deque()
        self._closing = False
        self._busy = False
        """The thread uses the writer now, and holds no lock meanwhile. Guarded by ``_changed``."""
        self._wakes_at = 0.0
        """When the thread looks at the queue again by itself (monotonic). Guarded by ``_changed``."""
        self._thread = threading.Thread(target=self._run, name="journal-writer", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def submit(self, encoded: EncodedRecord) -> QueuedRecord:
        """Queues a record whose caller waits for it, or writes it at once. Raises JournalUnavailable: queue
        full, or closed."""
        item = QueuedRecord(encoded)
        if encoded.size <= self._inline_bytes and self._written_inline(item):
            return item
        return self._put(item)

    def submit_soon(self, encoded: EncodedRecord) -> None:
        """Queues a record that nothing waits for: it is written with the next commit, at the latest after
        ``soon_window_s``. Raises JournalUnavailable: queue full, or closed."""
        self._put(QueuedRecord(encoded, due=time.monotonic() + self._bounds.soon_window_s))

    def barrier(self) -> QueuedRecord:
        """Answered when all records queued before it were stored or refused."""
        return self._put(QueuedRecord(None))

    def rotate(self) -> QueuedRecord:
        """Answered when a new segment was begun, so that the one before can be removed or rewritten."""
        return self._put(QueuedRecord(None, rotate=True))

    def close(self) -> None:
        """Writes what is queued, answers all callers, closes the writer and ends the thread. Idempotent.

        Waits for the thread, so it must not run in the event loop."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join()

    def _put(self, item: QueuedRecord) -> QueuedRecord:
        if item.encoded is not None and self._stats.queued_bytes + item.size > self._settings.max_queue_bytes:
            raise self._refusal(
                f"{self._stats.queued_bytes} bytes wait for the disk and this record has {item.size}; "
                f"the bound is {self._settings.max_queue_bytes} (journal.max_queue_bytes)."
            )
        with self._changed:
            if self._closing:
                raise self._refusal("The journal is closed.")
            self._stats.queued_bytes += item.size
            self._queue.append(item)
            if item.due is None or item.due < self._wakes_at:
                self._changed.notify()
        return item

    def _written_inline(self, item: QueuedRecord) -> bool:
        """Writes the record in the event loop, behind those that wait for the next commit. False, with nothing
        done, where that is the thread's work: it is at work, others wait for it, the record needs a new segment,
        or the disk was slow or in trouble."""
        began = time.perf_counter()
        if began < self._inline_from:
            return False
        with self._changed:
            if self._busy or self._closing or self.trouble is not None:
                return False
            batch, size = [*self._queue, item], item.size
            for queued in self._queue:
                if queued.due is None:
                    return False
                size += queued.size
            if size > self._inline_bytes or not self._writer.only_appends(size):
                return False
            self._queue.clear()
            self._stats.queued_bytes += item.size  # ``_answer`` takes it off again
            self._store_all(batch)
            if self._index_due is not None and self._index_due < self._wakes_at:
                self._changed.notify()
        self._stats.inline_records += len(batch)
        ended = time.perf_counter()
        if ended - began > self._bounds.inline_stall_s:
            self._stats.inline_stalls += 1
            self._inline_from = ended + self._bounds.inline_pause_s
        self._answer(batch)
        return True

    def _refusal(self, message: str) -> JournalUnavailable:
        self._stats.refused_records += 1
        return JournalUnavailable(f"The record was not stored. {message}")

    # -- in the thread ---------------------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            batch = self._next_batch()
            if batch is None:
                self._check_disk()
                continue
            if not batch:
                break
            self._store_all(batch)
            self._loop.call(self._answer, batch)
        self._publish(self._writer.close())

    def _next_batch(self) -> list[QueuedRecord] | None:
        """Waits until a record is due and takes all that are queued; empty at the end. None: the disk is to be
        checked. The writer is the thread's from then on, until it comes back here."""
        with self._changed:
            self._busy = False
            while not self._closing:
                if any(item.due is None for item in self._queue):
                    if self._bounds.group_window_s:
                        self._changed.wait_for(lambda: self._closing, self._bounds.group_window_s)
                    break
                now = time.monotonic()
                due = self._queue[0].due if self._queue else None
                if due is not None and due <= now:
                    break
                if self._index_due is not None and self._index_due <= now:
                    self._index_due = None
                    self._index()
                    continue
                if self._check_due <= now:
                    self._busy = True
                    return None
                times = [at for at in (due, self._index_due, self._check_due) if at is not None]
                self._wakes_at = min(times)
                self._changed.wait(self._wakes_at - now)
            self._busy = True
            batch = list(self._queue)
            self._queue.clear()
            return batch

    def _check_disk(self) -> None:
        """Finds out whether the disk takes records, also while nobody appends: ``/ready`` tells it."""
        self._check_due = time.monotonic() + self._bounds.check_interval_s
        trouble: Exception | None = self._writer.why_not(self._refused_bytes)
        if trouble is None:
            try:
                refused = self._refused_bytes if self.trouble is not None else None
                self._reserve.try_disk(self._settings.min_free_bytes, refused=refused)
            except OSError as error:
                trouble = error
        if trouble is not None and self.trouble is None:
            logger.error("The journal takes no turns: %s", trouble)
        elif trouble is None and self.trouble is not None:
            logger.warning("The journal takes turns again")
            self._refused_bytes = 0
        self.trouble = str(trouble) if trouble is not None else None

    # -- in the thread, or in the event loop with the lock held ---------------------------------------------

    def _store_all(self, batch: list[QueuedRecord]) -> None:
        """Stores or refuses each; never raises."""
        try:
            self._store(batch)
        except Exception as error:
            logger.exception("The journal's writer failed")
            for item in batch:
                item.error = error
        if self._index_due is None:
            self._index_due = time.monotonic() + self._bounds.index_lag_s

    def _store(self, batch: list[QueuedRecord]) -> None:
        items, size, rotates = [], 0, False
        for item in batch:
            size += item.size
            rotates = rotates or item.rotate
            if item.encoded is not None:
                items.append(item)
        why_not = self._writer.why_not(size) if items else None
        if why_not is not None:
            self._in_trouble(why_not, items)
            items = self._refuse_all_but_tombstones(items, why_not)
        refused = self._write(items)
        if refused and _is_full(refused[0].error):
            tombstones = self._refuse_all_but_tombstones(refused, refused[0].error)
            if tombstones and self._reserve.give_up():
                self._write(tombstones)
        if rotates:
            begun = self._writer.rotate()
            if _is_full(begun.error) and self._reserve.give_up():
                begun = self._writer.rotate()
            self._publish(begun.journaled)
            for item in batch:
                item.error = begun.error if item.rotate else item.error

    def _write(self, items: list[QueuedRecord]) -> list[QueuedRecord]:
        """Writes the records; those that the disk refused, each with why."""
        if not items:
            return []
        records, frees_only = [], True
        for item in items:
            item.error = None
            if item.encoded is not None:
                records.append(item.encoded)
                frees_only = frees_only and is_tombstone(item.encoded)
        written = self._writer.write(records)
        self._publish(written.journaled)
        refused = items[written.accepted :]
        for item in refused:
            item.error = written.error
        if written.error is not None:
            self._in_trouble(written.error, refused)
        elif not frees_only:
            self.trouble, self._refused_bytes = None, 0
        return refused

    def _in_trouble(self, why: Exception, refused: list[QueuedRecord]) -> None:
        smallest = min(item.size for item in refused)
        self._refused_bytes = min(self._refused_bytes or smallest, smallest)
        self.trouble = str(why)

    def _refuse_all_but_tombstones(self, items: list[QueuedRecord], why: Exception | None) -> list[QueuedRecord]:
        kept = [item for item in items if item.encoded is not None and is_tombstone(item.encoded)]
        for item in items:
            if item not in kept:
                item.error = why
        return kept

    # -- in the event loop -----------------------------------------------------------------------------------

    def _answer(self, batch: list[QueuedRecord]) -> None:
        failed, why = 0, None
        for item in batch:
            if item.error is not None:
                failed, why = failed + 1, why or item.error
        if failed:
            self._stats.refused_records += failed
            logger.error("%d records could not be stored: %s", failed, why)
        for item in batch:
            self._stats.queued_bytes -= item.size
            item.answer()


def _is_full(error: Exception | None) -> bool:
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
