"""FileJournal: the Journal on a directory of segment files.

Owns the directory's lock, a writer thread (the only one that appends; see ``commit``) and an index thread (the
index, reads, removal and compaction of segments), and releases all three in ``close``. What must hold: ``append``
returns only after the record is as durable as the setting says; ``read`` gives what a returned append stored,
before and after a crash; only what was deleted leaves the disk. It never looks into turns.
"""

from __future__ import annotations

import logging
import sqlite3
import threading
from collections.abc import AsyncIterator, Callable, Container, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

import anyio
import anyio.to_thread

from turnstile_server.errors import JournalUnavailable, StartupError
from turnstile_server.journal.bounds import JournalBounds
from turnstile_server.journal.commit import GroupCommit
from turnstile_server.journal.file_operations import DirectoryLock, FileOps, RealFiles
from turnstile_server.journal.index import JournalIndex, UnindexedEntries
from turnstile_server.journal.protocol import Record
from turnstile_server.journal.reading import PAGE, IndexReader
from turnstile_server.journal.recovery import recover
from turnstile_server.journal.reserve import Reserve
from turnstile_server.journal.segments import encode, segment_path
from turnstile_server.journal.space import DiskSpace, IndexAccess
from turnstile_server.journal.stats import JournalStats
from turnstile_server.journal.summaries import Summaries
from turnstile_server.journal.writer import SegmentTail, SegmentWriter
from turnstile_server.settings import JournalSettings
from turnstile_server.threads import result_of

logger = logging.getLogger(__name__)

SEGMENTS_PER_DISK = 64
"""A segment is at most this part of the file system: 1/64."""
SMALLEST_FITTED = 1 << 20
"""Bytes; segments are not made smaller than this for a small disk."""
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class OpenedDirectory:
    """A recovered directory, ready to append to at ``tail``."""

    directory: Path
    files: FileOps
    stats: JournalStats
    lock: DirectoryLock
    index: JournalIndex
    summaries: Summaries
    tail: SegmentTail


class FileJournal:
    """A ``Journal`` on disk. Make it with ``await FileJournal.open(...)``, and use it in that event loop only."""

    def __init__(
        self,
        opened: OpenedDirectory,
        settings: JournalSettings,
        thread: ThreadPoolExecutor,
        beside: Sequence[Path],
    ) -> None:
        self.stats = opened.stats
        self._directory = opened.directory
        self._settings = settings
        self._files = opened.files
        self._lock = opened.lock
        self._thread = thread
        self._index = opened.index
        self._summaries = opened.summaries
        self._reader = IndexReader(opened.index, partial(segment_path, opened.directory), opened.stats)
        self._unindexed = UnindexedEntries()
        writer = SegmentWriter(opened.directory, opened.files, settings, opened.stats, opened.tail, opened.lock)
        self._commit = GroupCommit(
            writer,
            settings,
            opened.stats,
            reserve=Reserve(opened.directory, opened.files, settings.bounds_of(JournalBounds).reserve_bytes),
            publish=self._unindexed.add,
            index=self._index_soon,
        )
        self._space = DiskSpace(
            opened.directory,
            opened.files,
            settings,
            opened.stats,
            IndexAccess(self._index, self._summaries, self._unindexed, self._in_thread),
            self._commit,
            opened.lock,
            beside,
        )
        self._closed = False
        self._released = False
        self._releasing = threading.Lock()

    @classmethod
    async def open(
        cls, directory: Path, settings: JournalSettings, files: FileOps | None = None, beside: Sequence[Path] = ()
    ) -> FileJournal:
        """Locks and recovers ``directory`` (made when missing). ``beside``: folders whose files count as the
        journal's in the bounds of the disk.

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
        journal = cls(opened, _fitted(settings, opened), thread, beside)
        journal._commit.start()
        return journal

    async def append(self, record: Record) -> int:
        """As in the protocol. Read-only arrays are not copied. Also raises ValueError and TypeError for a record
        that cannot be encoded (see ``segments.encode``)."""
        encoded = encode(record)
        await self._commit.submit(encoded).wait()
        return encoded.size

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
            return self._reader.records(episode_id, self._unindexed.snapshot())

        return await self._in_thread(work)

    async def state(self, episode_id: str) -> Record | None:
        """As in the protocol."""
        found = await self._in_thread(lambda: self._states_of([episode_id]))
        return found[0] if found else None

    async def episodes(self) -> AsyncIterator[Record]:
        """As in the protocol: the episodes there are when the iteration starts."""

        def begin() -> list[str]:
            self._summaries.take(self._index.take(self._unindexed))
            return self._index.episodes()

        names = await self._in_thread(begin)
        for start in range(0, len(names), PAGE):
            chunk = names[start : start + PAGE]
            for record in await self._in_thread(lambda chunk=chunk: self._states_of(chunk)):  # type: ignore[misc]
                yield record

    def _states_of(self, names: list[str]) -> list[Record]:
        return self._reader.states(names, self._unindexed.snapshot())

    @property
    def refusal(self) -> str | None:
        """As in the protocol."""
        return self._commit.trouble or self._space.over

    async def delete(self, episode_id: str) -> None:
        """As in the protocol. Records appended after it start the episode anew.

        Allowed below ``min_free_bytes``, because it is what frees space.
        """
        await self._space.delete([episode_id])

    async def apply_retention(
        self, now: float, spared: Container[str] = (), fresh: Container[str] = ()
    ) -> list[str]:
        """As in the protocol. Raises JournalUnavailable; then some of them may be deleted."""
        return await self._space.apply_retention(now, spared, fresh)

    async def excess(self) -> int:
        """As in the protocol."""
        return await self._space.excess()

    async def told_at_start(self) -> str:
        """One line about the directory and its bounds."""
        return await self._space.told_at_start()

    async def close(self) -> None:
        """As in the protocol. Appends already queued are stored and answered; later ones are refused."""
        self._closed = True
        await anyio.to_thread.run_sync(self._release)

    # -- threads ---------------------------------------------------------------------------------------------

    async def _in_thread(self, work: Callable[[], T]) -> T:
        if self._closed:
            raise JournalUnavailable("The journal is closed.")
        try:
            return await result_of(self._thread.submit(work))
        except (OSError, sqlite3.Error) as error:
            raise JournalUnavailable(f"The journal in {self._directory} cannot be read: {error}.") from error

    def _index_soon(self) -> None:
        self._thread.submit(self._take_quietly)

    def _take_quietly(self) -> None:
        try:
            self._summaries.take(self._index.take(self._unindexed))
        except sqlite3.Error as error:  # kept beside the index, taken with the next attempt
            self.stats.index_failures += 1
            logger.error("The index of %s could not be updated: %s", self._directory, error)

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
        self._take_quietly()
        self._index.close()


def _fitted(settings: JournalSettings, opened: OpenedDirectory) -> JournalSettings:
    """The settings with segments that are small beside the disk, because space is given back by the segment."""
    fitting = max(opened.files.total_bytes(opened.directory) // SEGMENTS_PER_DISK, SMALLEST_FITTED)
    return settings.model_copy(update={"segment_bytes": min(settings.segment_bytes, fitting)})


def _open(directory: Path, files: FileOps) -> OpenedDirectory:
    try:
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        lock = DirectoryLock.acquire(directory)
    except OSError as error:
        raise StartupError(f"The data directory {directory} cannot be used: {error}.") from error
    index: JournalIndex | None = None
    stats = JournalStats()
    try:
        index = JournalIndex()
        summaries = Summaries(directory, stats)
        tail = recover(directory, files, index, summaries, stats)
        return OpenedDirectory(directory, files, stats, lock, index, summaries, tail)
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
