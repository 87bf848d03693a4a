"""Group commit: many callers in the event loop, one writer thread, one write and one fdatasync for all that wait.

What must hold: records reach the writer in the order of ``submit``; a caller is answered after its record was
stored or refused, never before; the queue is bounded in bytes; when the thread ends, every caller has been
answered. The loop never waits for the disk: it takes the lock only to append to the queue.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import anyio

from turnstile_server.errors import JournalUnavailable
from turnstile_server.journal.entries import Journaled
from turnstile_server.journal.segments import EncodedRecord
from turnstile_server.journal.stats import JournalStats
from turnstile_server.journal.writer import SegmentWriter, is_tombstone
from turnstile_server.settings import JournalSettings
from turnstile_server.threads import LoopCaller

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class QueuedRecord:
    """A record on its way to the disk.

    ``encoded`` None: a barrier, which is answered after all records before it. ``due`` None: a caller waits;
    else the monotonic time by which the record must be written.
    """

    encoded: EncodedRecord | None
    due: float | None = None
    error: Exception | None = None
    answered: anyio.Event = field(default_factory=anyio.Event)

    @property
    def size(self) -> int:
        return self.encoded.size if self.encoded is not None else 0

    async def wait(self) -> None:
        """Returns when the record was stored; cancelling the caller does not take it back. Raises
        JournalUnavailable."""
        await self.answered.wait()
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
        publish: Callable[[Sequence[Journaled]], None],
        index: Callable[[], None],
    ) -> None:
        self._writer = writer
        self._settings = settings
        self._stats = stats
        self._publish = publish
        """Called in the thread, before the callers are answered."""
        self._index = index
        """Called in the thread, ``index_lag_s`` after the first record that was published since the last time."""
        self._index_due: float | None = None
        self._loop = LoopCaller()
        self._changed = threading.Condition()
        self._queue: deque[QueuedRecord] = deque()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="journal-writer", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def submit(self, encoded: EncodedRecord) -> QueuedRecord:
        """Queues a record whose caller waits for it. Raises JournalUnavailable: queue full, or closed."""
        return self._put(QueuedRecord(encoded))

    def submit_soon(self, encoded: EncodedRecord) -> None:
        """Queues a record that nothing waits for: it is written with the next commit, at the latest after
        ``soon_window_s``. Raises JournalUnavailable: queue full, or closed."""
        self._put(QueuedRecord(encoded, due=time.monotonic() + self._settings.soon_window_s))

    def barrier(self) -> QueuedRecord:
        """Answered when all records queued before it were stored or refused."""
        return self._put(QueuedRecord(None))

    def close(self) -> None:
        """Writes what is queued, answers all callers, closes the writer and ends the thread. Idempotent.

        Waits for the thread, so it must not run in the event loop."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join()

    def _put(self, item: QueuedRecord) -> QueuedRecord:
        if self._closing:
            raise self._refusal("The journal is closed.")
        if item.encoded is not None and self._stats.queued_bytes + item.size > self._settings.max_queue_bytes:
            raise self._refusal(
                f"{self._stats.queued_bytes} bytes wait for the disk and this record has {item.size}; "
                f"the bound is {self._settings.max_queue_bytes} (journal.max_queue_bytes)."
            )
        self._stats.queued_bytes += item.size
        with self._changed:
            self._queue.append(item)
            self._changed.notify()
        return item

    def _refusal(self, message: str) -> JournalUnavailable:
        self._stats.refused_records += 1
        return JournalUnavailable(f"The record was not stored. {message}")

    # -- in the thread ---------------------------------------------------------------------------------------

    def _run(self) -> None:
        while batch := self._next_batch():
            try:
                self._store(batch)
            except Exception as error:
                logger.exception("The journal's writer failed")
                for item in batch:
                    item.error = error
            if self._index_due is None:
                self._index_due = time.monotonic() + self._settings.index_lag_s
            self._loop.call(self._answer, batch)
        self._publish(self._writer.close())

    def _next_batch(self) -> list[QueuedRecord]:
        """Waits until a record is due and takes all that are queued; empty at the end."""
        with self._changed:
            while not self._closing:
                if any(item.due is None for item in self._queue):
                    if self._settings.group_window_s:
                        self._changed.wait_for(lambda: self._closing, self._settings.group_window_s)
                    break
                now = time.monotonic()
                due = self._queue[0].due if self._queue else None
                if due is not None and due <= now:
                    break
                if self._index_due is not None and self._index_due <= now:
                    self._index_due = None
                    self._index()
                    continue
                times = [at for at in (due, self._index_due) if at is not None]
                self._changed.wait(min(times) - now if times else None)
            batch = list(self._queue)
            self._queue.clear()
            return batch

    def _store(self, batch: list[QueuedRecord]) -> None:
        items = [item for item in batch if item.encoded is not None]
        low = self._writer.low_on_space(sum(item.size for item in items)) if items else None
        if low is not None:
            for item in items:
                if item.encoded is not None and not is_tombstone(item.encoded):
                    item.error = low
            items = [item for item in items if item.error is None]
        written = self._writer.write([item.encoded for item in items if item.encoded is not None])
        self._publish(written.journaled)
        for item in items[written.accepted :]:
            item.error = written.error

    # -- in the event loop -----------------------------------------------------------------------------------

    def _answer(self, batch: list[QueuedRecord]) -> None:
        failed = [item for item in batch if item.error is not None]
        if failed:
            self._stats.refused_records += len(failed)
            logger.error("%d records could not be stored: %s", len(failed), failed[0].error)
        for item in batch:
            self._stats.queued_bytes -= item.size
            item.answered.set()
