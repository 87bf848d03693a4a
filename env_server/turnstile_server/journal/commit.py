"""Group commit: many callers on the loop, one writer thread, one write and one fdatasync for all that wait.

What must hold: records reach the writer in the order of ``submit``; a caller is answered after its record is
stored or refused, never before; the queue is bounded in bytes; when the thread ends, every caller has been
answered. The loop never waits for the disk: it takes the lock only to append to or look at the queue.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from turnstile_server.errors import JournalUnavailable
from turnstile_server.journal.entries import Journaled
from turnstile_server.journal.segments import Encoded
from turnstile_server.journal.stats import JournalStats
from turnstile_server.journal.writer import SegmentWriter, is_tombstone
from turnstile_server.settings import JournalSettings

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class Item:
    """``encoded`` None: a barrier, answered when all before it were. ``answer`` None: nobody waits."""

    encoded: Encoded | None
    answer: asyncio.Future[None] | None
    due: float
    error: Exception | None = None

    @property
    def size(self) -> int:
        return self.encoded.size if self.encoded is not None else 0


class GroupCommit:
    """Constructed and used on the loop; owns the thread from ``start`` to the end of ``stop``."""

    def __init__(
        self,
        writer: SegmentWriter,
        settings: JournalSettings,
        stats: JournalStats,
        *,
        publish: Callable[[Sequence[Journaled]], None],
        settled: Callable[[], None],
    ) -> None:
        self._writer = writer
        self._settings = settings
        self._stats = stats
        self._publish = publish
        """Called in the thread, before the callers are answered."""
        self._settled = settled
        """Called on the loop, after they were."""
        self._loop = asyncio.get_running_loop()
        self._changed = threading.Condition()
        self._queue: deque[Item] = deque()
        self._closing = False
        self._ended: asyncio.Future[None] = self._loop.create_future()
        self._thread = threading.Thread(target=self._run, name="journal-writer", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def submit(self, encoded: Encoded) -> asyncio.Future[None]:
        """The answer; cancelling it does not take the record back. Raises JournalUnavailable: full or closed."""
        answer = self._loop.create_future()
        self._put(Item(encoded, answer, 0.0))
        return answer

    def submit_soon(self, encoded: Encoded) -> None:
        """As ``submit``, but nobody waits: it goes with the next commit, at latest after ``soon_window_s``."""
        self._put(Item(encoded, None, time.monotonic() + self._settings.soon_window_s))

    def barrier(self) -> asyncio.Future[None]:
        """Answered when everything submitted before was stored or refused."""
        answer = self._loop.create_future()
        self._put(Item(None, answer, 0.0))
        return answer

    async def stop(self) -> None:
        """Writes what is queued, answers everybody, closes the writer, ends the thread. Idempotent."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        await asyncio.shield(self._ended)
        self._thread.join()

    def _put(self, item: Item) -> None:
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

    def _refusal(self, message: str) -> JournalUnavailable:
        self._stats.refused_records += 1
        return JournalUnavailable(f"The record was not stored. {message}")

    # -- in the thread ---------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while batch := self._next_batch():
                try:
                    self._store(batch)
                except Exception as error:
                    logger.exception("The journal's writer failed")
                    for item in batch:
                        item.error = error
                self._loop.call_soon_threadsafe(self._settle, batch)
            self._publish(self._writer.close())
        finally:
            self._loop.call_soon_threadsafe(self._end)

    def _next_batch(self) -> list[Item]:
        """Waits for something due and takes all that is queued; empty at the end."""
        with self._changed:
            while not self._closing:
                if any(item.answer is not None for item in self._queue):
                    if self._settings.group_window_s:
                        self._changed.wait_for(lambda: self._closing, self._settings.group_window_s)
                    break
                left = self._queue[0].due - time.monotonic() if self._queue else None
                if left is not None and left <= 0:
                    break
                self._changed.wait(left)
            batch = list(self._queue)
            self._queue.clear()
            return batch

    def _store(self, batch: list[Item]) -> None:
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

    # -- on the loop -----------------------------------------------------------------------------------------

    def _settle(self, batch: list[Item]) -> None:
        failed = [item for item in batch if item.error is not None]
        if failed:
            self._stats.refused_records += len(failed)
            logger.error("%d records could not be stored: %s", len(failed), failed[0].error)
        for item in batch:
            self._stats.queued_bytes -= item.size
            if item.answer is None or item.answer.done():
                continue
            if item.error is None:
                item.answer.set_result(None)
            else:
                item.answer.set_exception(
                    JournalUnavailable(
                        f"The record was not stored: {item.error}. Free space or repair the disk that holds the "
                        "data directory; the call may be sent again."
                    )
                )
        self._settled()

    def _end(self) -> None:
        if not self._ended.done():
            self._ended.set_result(None)
