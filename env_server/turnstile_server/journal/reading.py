"""Reading a journal by its index, and a journal that is only read: of a stopped server, of a copy, or exported.

What must hold of a ``ReadOnlyJournal``: it changes no byte and no name in the directory, and keeps nobody from it;
damage costs what is damaged, each with a line in the log.
"""

from __future__ import annotations

import sqlite3
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import anyio.to_thread

from turnstile_server.errors import JournalUnavailable, StartupError
from turnstile_server.journal.entries import Journaled, place
from turnstile_server.journal.file_operations import check_unused
from turnstile_server.journal.index import JournalIndex
from turnstile_server.journal.protocol import Record, RecordType
from turnstile_server.journal.recovery import survey
from turnstile_server.journal.segments import RecordReader
from turnstile_server.journal.stats import JournalStats
from turnstile_server.threads import result_of

PAGE = 256
"""Episodes read per turn of the index thread, so that other reads get in between."""
T = TypeVar("T")


class IndexReader:
    """Reads what the index knows of. Used in the journal's index thread. ``path_of``: a segment's file."""

    def __init__(self, index: JournalIndex, path_of: Callable[[int], Path], stats: JournalStats) -> None:
        self._index = index
        self._path_of = path_of
        self._records = RecordReader(path_of, stats)

    def records(self, episode_id: str, unindexed: Sequence[Journaled] = ()) -> list[Record]:
        """All living records of an episode, in order."""
        return self._records.records(episode_id, self._index.locations(episode_id, unindexed))

    def states(self, names: Sequence[str], unindexed: Sequence[Journaled] = ()) -> list[Record]:
        """The last state of each episode that still lives; the one before it where that is damaged."""
        found: list[Record] = []
        for name in names:
            locations = self._index.locations(name, unindexed)
            states = [location for location in locations if location.type == RecordType.EPISODE]
            if not locations:
                continue  # deleted meanwhile
            damage = None if states else "it is not in the journal any more"
            for location in reversed(states):
                if records := self._records.records(name, [location]):
                    found.append(replace(records[0], damage=damage))
                    break
                segment, offset = place(location.position)
                damage = damage or f"{self._path_of(segment)} is damaged at byte {offset}"
            else:
                found.append(Record(RecordType.EPISODE, name, {}, damage=damage))
        return found


class ReadOnlyJournal:
    """A ``JournalReading`` of a directory that no server uses. Make it with ``await ReadOnlyJournal.open(...)``.

    A server that starts on the directory later is not kept out: what it removes cannot be read here any more.
    """

    def __init__(self, directory: Path, index: JournalIndex, reader: IndexReader, thread: ThreadPoolExecutor):
        self._directory = directory
        self._index = index
        self._reader = reader
        self._thread = thread

    @classmethod
    async def open(cls, directory: Path) -> ReadOnlyJournal:
        """Raises StartupError: there is no such directory or nothing of a journal in it, a server uses it, or it
        is of a newer format."""
        thread = ThreadPoolExecutor(1, thread_name_prefix="journal-reading")
        try:
            index, reader = await result_of(thread.submit(_survey, directory))
        except BaseException:
            thread.shutdown(wait=False)
            raise
        return cls(directory, index, reader, thread)

    async def flush(self) -> None:
        """As in the protocol: nothing is ever given."""

    async def read(self, episode_id: str) -> list[Record]:
        """As in the protocol. A record that the disk damaged is left out, and logged."""
        return await self._in_thread(lambda: self._reader.records(episode_id))

    async def episodes(self) -> AsyncIterator[Record]:
        """As in the protocol."""
        names = await self._in_thread(self._index.episodes)
        for start in range(0, len(names), PAGE):
            chunk = names[start : start + PAGE]
            for record in await self._in_thread(lambda chunk=chunk: self._reader.states(chunk)):  # type: ignore[misc]
                yield record

    async def close(self) -> None:
        """Idempotent."""
        await anyio.to_thread.run_sync(self._release)

    def _release(self) -> None:
        try:
            self._thread.submit(self._index.close)
        except RuntimeError:  # it was closed before
            return
        self._thread.shutdown()

    async def _in_thread(self, work: Callable[[], T]) -> T:
        try:
            return await result_of(self._thread.submit(work))
        except (OSError, sqlite3.Error) as error:
            raise JournalUnavailable(f"The journal in {self._directory} cannot be read: {error}.") from error


def _survey(directory: Path) -> tuple[JournalIndex, IndexReader]:
    stats, index = JournalStats(), JournalIndex()
    try:
        check_unused(directory)
        paths = survey(directory, index, stats)
    except BaseException as error:
        index.close()
        if isinstance(error, OSError | sqlite3.Error):
            raise StartupError(f"The journal in {directory} cannot be read: {error}.") from error
        raise
    return index, IndexReader(index, paths.__getitem__, stats)
