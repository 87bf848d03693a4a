"""Several journals that are only read, as one: those of the worker processes of one data directory.

What must hold: an episode is in one of them, whole; episodes come oldest first, those of one journal in its order.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path

from turnstile_server.journal.protocol import Record
from turnstile_server.journal.reading import ReadOnlyJournal


class JoinedJournals:
    """A ``JournalReading``. ``created_at``: of the episode that a record tells of, Unix seconds; a record that
    does not say it comes as soon as those before it."""

    def __init__(self, journals: Sequence[ReadOnlyJournal], created_at: Callable[[Record], float]) -> None:
        self._journals = journals
        self._created_at = created_at

    @classmethod
    async def open(
        cls, directories: Sequence[Path], created_at: Callable[[Record], float], stack: AsyncExitStack
    ) -> JoinedJournals:
        """``stack`` closes them. Raises StartupError as ``ReadOnlyJournal.open``."""
        journals = []
        for directory in directories:
            journal = await ReadOnlyJournal.open(directory)
            stack.push_async_callback(journal.close)
            journals.append(journal)
        return cls(journals, created_at)

    async def flush(self) -> None:
        """As in the protocol: nothing is ever given."""

    async def read(self, episode_id: str) -> list[Record]:
        """As in the protocol."""
        for journal in self._journals:
            if records := await journal.read(episode_id):
                return records
        return []

    async def episodes(self) -> AsyncIterator[Record]:
        """As in the protocol."""
        streams = [journal.episodes() for journal in self._journals]
        heads = [(stream, record) for stream in streams if (record := await anext(stream, None)) is not None]
        while heads:
            place = min(range(len(heads)), key=lambda each: self._created_at(heads[each][1]))
            stream, record = heads[place]
            yield record
            following = await anext(stream, None)
            if following is None:
                del heads[place]
            else:
                heads[place] = (stream, following)
