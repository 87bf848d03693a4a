"""FileJournal: the Journal on a directory of segment files.

Owns the directory's lock, a writer thread (the only one that appends; see ``commit``) and an index thread (SQLite,
reads, removal of dead segments), and releases all three in ``close``. What must hold: ``append`` returns only
after the record is as durable as the setting says; what a returned append stored is what ``read`` gives, before
and after a crash; nothing is removed but segments in which every episode was deleted. It never looks into turns.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sqlite3
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from turnstile_server.errors import JournalUnavailable, StartupError
from turnstile_server.journal.commit import GroupCommit
from turnstile_server.journal.files import DirectoryLock, FileOps, RealFiles
from turnstile_server.journal.index import Index, State, Unindexed
from turnstile_server.journal.protocol import Record, RecordType
from turnstile_server.journal.reader import Reader
from turnstile_server.journal.recovery import recover
from turnstile_server.journal.retention import expired
from turnstile_server.journal.segments import encode
from turnstile_server.journal.stats import JournalStats
from turnstile_server.journal.writer import SegmentWriter, Tail, segment_path
from turnstile_server.settings import JournalSettings

logger = logging.getLogger(__name__)

PAGE = 256
"""Episodes read per turn of the index thread, so that other reads get in between."""
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Opened:
    """A recovered directory, ready to append to at ``tail``."""

    directory: Path
    files: FileOps
    stats: JournalStats
    lock: DirectoryLock
    index: Index
    tail: Tail


class FileJournal:
    """Use ``await FileJournal.open(...)``. All methods belong to the loop that opened it."""

    def __init__(self, opened: Opened, settings: JournalSettings, thread: ThreadPoolExecutor) -> None:
        self.stats = opened.stats
        self._directory = opened.directory
        self._settings = settings
        self._files = opened.files
        self._lock = opened.lock
        self._thread = thread
        self._index = opened.index
        self._reader = Reader(opened.directory, opened.stats)
        self._unindexed = Unindexed()
        writer = SegmentWriter(opened.directory, opened.files, settings, opened.stats, opened.tail)
        self._commit = GroupCommit(
            writer,
            settings,
            opened.stats,
            publish=self._unindexed.add,
            settled=self._index_later,
        )
        self._indexing: asyncio.TimerHandle | None = None
        self._collecting = asyncio.Lock()
        self._closing: asyncio.Task[None] | None = None

    @classmethod
    async def open(cls, directory: Path, settings: JournalSettings, files: FileOps | None = None) -> FileJournal:
        """Locks and recovers ``directory`` (made when missing).

        Raises StartupError: in use by another process, not writable, or of a newer format.
        """
        operations = files if files is not None else RealFiles()
        thread = ThreadPoolExecutor(1, thread_name_prefix="journal-index")
        opening = asyncio.get_running_loop().run_in_executor(thread, _open, directory, operations)
        try:
            opened = await asyncio.shield(opening)
        except BaseException:
            opening.add_done_callback(lambda done: _abandon(done, thread))
            raise
        journal = cls(opened, settings, thread)
        journal._commit.start()
        return journal

    async def append(self, record: Record) -> None:
        """As in the protocol. Read-only arrays are not copied. Also raises ValueError and TypeError for a record
        that cannot be encoded (see ``segments.encode``)."""
        await self._commit.submit(encode(record))

    def append_soon(self, record: Record) -> None:
        """As in the protocol: written with the next append, at latest after ``soon_window_s``. Until then ``read``
        does not see it; ``flush`` waits for it."""
        encoded = encode(record)
        try:
            self._commit.submit_soon(encoded)
        except JournalUnavailable as error:
            logger.error("A record of %s was not stored: %s", record.episode_id, error.message)

    async def flush(self) -> None:
        """Returns when everything given before was stored or refused."""
        await self._commit.barrier()

    async def read(self, episode_id: str) -> list[Record]:
        """As in the protocol. A record that the disk damaged is left out, logged and counted."""

        def work() -> list[Record]:
            locations = self._index.locations(episode_id, self._unindexed.snapshot())
            return self._reader.records(episode_id, locations)

        return await self._in_thread(work)

    async def episodes(self) -> AsyncIterator[Record]:
        """As in the protocol: the episodes there are when the iteration starts."""

        def begin() -> list[State]:
            self._index.take(self._unindexed)
            return self._index.states()

        def page(states: list[State]) -> list[Record]:
            return [
                record for state in states for record in self._reader.records(state.episode_id, [state.location])
            ]

        states = await self._in_thread(begin)
        for start in range(0, len(states), PAGE):
            chunk = states[start : start + PAGE]
            for record in await self._in_thread(lambda chunk=chunk: page(chunk)):  # type: ignore[misc]
                yield record

    async def delete(self, episode_id: str) -> None:
        """As in the protocol. Records appended after it start the episode anew.

        Allowed below ``min_free_bytes``, because it is what frees space.
        """
        await self._delete([episode_id])
        await self._collect()

    async def apply_retention(self, now: float) -> list[str]:
        """Deletes ended episodes by ``retention_days`` and ``retention_bytes``, oldest first; returns their ids.

        ``now`` is Unix seconds. Raises JournalUnavailable; then some of them may be deleted.
        """
        days, size = self._settings.retention_days, self._settings.retention_bytes

        def choose() -> list[str]:
            self._index.take(self._unindexed)
            return expired(self._index.states(), self._index.sizes(), now, days, size)

        chosen = await self._in_thread(choose) if days is not None or size is not None else []
        await self._delete(chosen)
        await self._collect()
        return chosen

    async def close(self) -> None:
        """As in the protocol. Appends already queued are stored and answered; later ones are refused."""
        if self._closing is None:
            self._closing = asyncio.create_task(self._close())
        await asyncio.shield(self._closing)

    # -- deleting --------------------------------------------------------------------------------------------

    async def _delete(self, episode_ids: list[str]) -> None:
        await self.flush()

        def known() -> list[str]:
            unindexed = self._unindexed.snapshot()
            return [name for name in episode_ids if self._index.locations(name, unindexed)]

        names = await self._in_thread(known)
        if not names:
            return
        tombstones = [self._commit.submit(encode(Record(RecordType.EPISODE_DELETED, name, {}))) for name in names]
        await asyncio.gather(*tombstones)

    async def _collect(self) -> None:
        """Removes dead segments, oldest first, each after the tombstones that must outlive it are stored again."""
        async with self._collecting:
            while (found := await self._in_thread(self._next_dead)) is not None:
                segment, tombstones = found
                carried = [
                    self._commit.submit(encode(Record(RecordType.EPISODE_DELETED, name, {"before": before})))
                    for name, before in tombstones
                ]
                await asyncio.gather(*carried)
                await self._in_thread(lambda segment=segment: self._remove(segment))  # type: ignore[misc]

    def _next_dead(self) -> tuple[int, list[tuple[str, int]]] | None:
        self._index.take(self._unindexed)
        segment = self._index.next_removable()
        return None if segment is None else (segment, self._index.tombstones_needed(segment))

    def _remove(self, segment: int) -> None:
        with contextlib.suppress(FileNotFoundError):  # an earlier attempt failed after this step
            self._files.remove(segment_path(self._directory, segment))
        self._files.sync_directory(self._directory)
        self._index.forget_segment(segment)
        self.stats.segments_removed += 1

    # -- threads ---------------------------------------------------------------------------------------------

    async def _in_thread(self, work: Callable[[], T]) -> T:
        if self._closing is not None:
            raise JournalUnavailable("The journal is closed.")
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, work)
        except (OSError, sqlite3.Error) as error:
            raise JournalUnavailable(f"The journal in {self._directory} cannot be read: {error}.") from error

    def _index_later(self) -> None:
        if self._indexing is None and self._closing is None:
            loop = asyncio.get_running_loop()
            self._indexing = loop.call_later(self._settings.index_lag_s, self._index_now)

    def _index_now(self) -> None:
        self._indexing = None
        self._thread.submit(self._take)

    def _take(self) -> None:
        try:
            self._index.take(self._unindexed)
        except sqlite3.Error as error:  # kept in memory, taken with the next attempt; at worst rebuilt at open
            self.stats.index_failures += 1
            logger.error("The index in %s could not be updated: %s", self._directory, error)

    async def _close(self) -> None:
        try:
            await self._commit.stop()
            if self._indexing is not None:
                self._indexing.cancel()
            await asyncio.get_running_loop().run_in_executor(self._thread, self._close_index)
        finally:
            self._thread.shutdown()
            self._lock.release()

    def _close_index(self) -> None:
        self._take()
        self._index.close()


def _open(directory: Path, files: FileOps) -> Opened:
    try:
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        lock = DirectoryLock.acquire(directory)
    except OSError as error:
        raise StartupError(f"The data directory {directory} cannot be used: {error}.") from error
    index: Index | None = None
    stats = JournalStats()
    try:
        index = Index.open(directory)
        return Opened(directory, files, stats, lock, index, recover(directory, files, index, stats))
    except BaseException as error:
        if index is not None:
            index.close()
        lock.release()
        if isinstance(error, OSError | sqlite3.Error):
            raise StartupError(f"The journal in {directory} cannot be opened: {error}.") from error
        raise


def _abandon(opening: asyncio.Future[Opened], thread: ThreadPoolExecutor) -> None:
    """Gives back what an open obtained after its caller had gone; a failed open holds nothing."""
    if not opening.cancelled() and opening.exception() is None:
        opened = opening.result()
        if opened.tail.fd is not None:
            opened.files.close(opened.tail.fd)
        thread.submit(opened.index.close).result()
        opened.lock.release()
    thread.shutdown(wait=False)
