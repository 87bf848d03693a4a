"""FileJournal: the Journal on a directory of segment files.

Owns the directory's lock, a writer thread (the only one that appends; see ``commit``) and an index thread (SQLite,
reads, removal of dead segments), and releases all three in ``close``. What must hold: ``append`` returns only
after the record is as durable as the setting says; ``read`` gives what a returned append stored, before and after
a crash; only segments in which every episode was deleted are removed. It never looks into turns.
"""

from __future__ import annotations

import contextlib
import logging
import sqlite3
import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import anyio
import anyio.to_thread

from turnstile_server.errors import JournalUnavailable, StartupError
from turnstile_server.journal.commit import GroupCommit
from turnstile_server.journal.files import DirectoryLock, FileOps, RealFiles
from turnstile_server.journal.index import JournalIndex, LastState, UnindexedEntries, expired
from turnstile_server.journal.protocol import Record, RecordType
from turnstile_server.journal.recovery import recover
from turnstile_server.journal.segments import RecordReader, encode, segment_path
from turnstile_server.journal.stats import JournalStats
from turnstile_server.journal.writer import SegmentTail, SegmentWriter
from turnstile_server.settings import JournalSettings
from turnstile_server.threads import result_of

logger = logging.getLogger(__name__)

PAGE = 256
"""Episodes read per turn of the index thread, so that other reads get in between."""
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class OpenedDirectory:
    """A recovered directory, ready to append to at ``tail``."""

    directory: Path
    files: FileOps
    stats: JournalStats
    lock: DirectoryLock
    index: JournalIndex
    tail: SegmentTail


class FileJournal:
    """A ``Journal`` on disk. Make it with ``await FileJournal.open(...)``, and use it in that event loop only."""

    def __init__(self, opened: OpenedDirectory, settings: JournalSettings, thread: ThreadPoolExecutor) -> None:
        self.stats = opened.stats
        self._directory = opened.directory
        self._settings = settings
        self._files = opened.files
        self._lock = opened.lock
        self._thread = thread
        self._index = opened.index
        self._reader = RecordReader(opened.directory, opened.stats)
        self._unindexed = UnindexedEntries()
        writer = SegmentWriter(opened.directory, opened.files, settings, opened.stats, opened.tail)
        self._commit = GroupCommit(
            writer,
            settings,
            opened.stats,
            publish=self._unindexed.add,
            index=self._index_soon,
        )
        self._collecting = anyio.Lock()
        self._closed = False
        self._released = False
        self._releasing = threading.Lock()

    @classmethod
    async def open(cls, directory: Path, settings: JournalSettings, files: FileOps | None = None) -> FileJournal:
        """Locks and recovers ``directory`` (made when missing).

        Raises StartupError: in use by another process, not writable, or of a newer format.
        """
        operations = files if files is not None else RealFiles()
        thread = ThreadPoolExecutor(1, thread_name_prefix="journal-index")
        opening = thread.submit(_open, directory, operations)
        try:
            opened = await result_of(opening)
        except BaseException:
            thread.submit(_abandon, opening)
            thread.shutdown(wait=False)
            raise
        journal = cls(opened, settings, thread)
        journal._commit.start()
        return journal

    async def append(self, record: Record) -> None:
        """As in the protocol. Read-only arrays are not copied. Also raises ValueError and TypeError for a record
        that cannot be encoded (see ``segments.encode``)."""
        await self._commit.submit(encode(record)).wait()

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
        await self._commit.barrier().wait()

    async def read(self, episode_id: str) -> list[Record]:
        """As in the protocol. A record that the disk damaged is left out, logged and counted."""

        def work() -> list[Record]:
            locations = self._index.locations(episode_id, self._unindexed.snapshot())
            return self._reader.records(episode_id, locations)

        return await self._in_thread(work)

    async def episodes(self) -> AsyncIterator[Record]:
        """As in the protocol: the episodes there are when the iteration starts."""

        def begin() -> list[LastState]:
            self._index.take(self._unindexed)
            return self._index.states()

        def page(states: list[LastState]) -> list[Record]:
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
        self._closed = True
        await anyio.to_thread.run_sync(self._release)

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
        for tombstone in tombstones:
            await tombstone.wait()

    async def _collect(self) -> None:
        """Removes dead segments, oldest first, each after the tombstones that must outlive it are stored again."""
        async with self._collecting:
            while (found := await self._in_thread(self._next_dead)) is not None:
                segment, tombstones = found
                carried = [
                    self._commit.submit(encode(Record(RecordType.EPISODE_DELETED, name, {"before": before})))
                    for name, before in tombstones
                ]
                for tombstone in carried:
                    await tombstone.wait()
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
        if self._closed:
            raise JournalUnavailable("The journal is closed.")
        try:
            return await result_of(self._thread.submit(work))
        except (OSError, sqlite3.Error) as error:
            raise JournalUnavailable(f"The journal in {self._directory} cannot be read: {error}.") from error

    def _index_soon(self) -> None:
        self._thread.submit(self._take)

    def _take(self) -> None:
        try:
            self._index.take(self._unindexed)
        except sqlite3.Error as error:  # kept in memory, taken with the next attempt; at worst rebuilt at open
            self.stats.index_failures += 1
            logger.error("The index in %s could not be updated: %s", self._directory, error)

    def _release(self) -> None:
        """Ends both threads and gives up the lock, once. Runs in a worker thread, which goes on when the caller of
        ``close`` is cancelled; a second caller waits for the first."""
        with self._releasing:
            if self._released:
                return
            self._released = True
            try:
                self._commit.close()
                self._thread.submit(self._close_index).result()
            finally:
                self._thread.shutdown()
                self._lock.release()

    def _close_index(self) -> None:
        self._take()
        self._index.close()


def _open(directory: Path, files: FileOps) -> OpenedDirectory:
    try:
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        lock = DirectoryLock.acquire(directory)
    except OSError as error:
        raise StartupError(f"The data directory {directory} cannot be used: {error}.") from error
    index: JournalIndex | None = None
    stats = JournalStats()
    try:
        index = JournalIndex.open(directory)
        return OpenedDirectory(directory, files, stats, lock, index, recover(directory, files, index, stats))
    except BaseException as error:
        if index is not None:
            index.close()
        lock.release()
        if isinstance(error, OSError | sqlite3.Error):
            raise StartupError(f"The journal in {directory} cannot be opened: {error}.") from error
        raise


def _abandon(opening: Future[OpenedDirectory]) -> None:
    """Releases a directory that was opened after its caller had gone. A failed open holds nothing."""
    if opening.exception() is None:
        opened = opening.result()
        if opened.tail.fd is not None:
            opened.files.close(opened.tail.fd)
        opened.index.close()
        opened.lock.release()
