"""The seam to disk: append-only, durable before acknowledged, readable after any crash.

A journal stores records; it knows nothing of trees or prompts. ``read`` gives the records of an episode in the
order of their ``append`` calls. One journal owns one directory.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Container, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt


class RecordType(IntEnum):
    """Types on disk. A reader skips types it does not know; numbers are never reused."""

    EPISODE = 1
    """An episode's state (the whole record; the last one wins)."""
    TURN = 2
    DELIVERY = 3
    DISCARD = 4
    EPISODE_DELETED = 5
    EXPORTED = 6
    """A trainer has fetched the ended episode: bounds of the disk may delete it."""
    SPAN = 7
    """A piece of an episode's time that has ended, or how many were left out."""
    ANSWER = 8
    """What an external agent submitted; the last one wins."""


@dataclass(frozen=True, slots=True)
class Record:
    """One record of an episode. ``meta`` is JSON; ``arrays`` are 1-D NumPy arrays, stored as bytes
    (little-endian), never as JSON."""

    type: RecordType
    episode_id: str
    meta: Mapping[str, Any]
    arrays: Mapping[str, npt.NDArray[np.generic]] = field(default_factory=dict)
    damage: str | None = None
    """Set by ``episodes`` only: the episode's last EPISODE record cannot be read, and why. This is the one before
    it, or one without ``meta``."""


class JournalReading(Protocol):
    """Reads records by episode."""

    async def flush(self) -> None:
        """Returns when everything that was given before can be read, or was refused."""
        ...

    async def read(self, episode_id: str) -> list[Record]:
        """All records of an episode, in order; empty when it is unknown or deleted."""
        ...

    def episodes(self) -> AsyncIterator[Record]:
        """The last EPISODE record of every episode that is not deleted, oldest first.

        An episode of which anything can be read is never left out: see ``Record.damage``."""
        ...


class Journal(JournalReading, Protocol):
    """Stores records by episode."""

    async def append(self, record: Record) -> int:
        """Returns the record's bytes, once it is as durable as the ``durability`` setting says.

        Raises JournalUnavailable (disk full, I/O error, closed): then the record is not in the journal and never
        will be. Cancelling the caller does not undo an append: the record may be there."""
        ...

    def append_soon(self, record: Record) -> None:
        """Queues a record that nothing waits for (deliveries). Keeps the order; durable with the next group
        commit or at close. A failure is logged and counted, never raised."""
        ...

    async def state(self, episode_id: str) -> Record | None:
        """The last EPISODE record of one episode; None when it is unknown or deleted. ``damage`` as in
        ``episodes``."""
        ...

    async def delete(self, episode_id: str) -> None:
        """Marks the episode deleted (durable) and frees its space as soon as segments allow. No-op for an unknown
        episode."""
        ...

    async def apply_retention(
        self, now: float, spared: Container[str] = (), fresh: Container[str] = ()
    ) -> list[str]:
        """Deletes ended episodes that are too old at Unix time ``now`` or above the size bound, oldest first,
        but none of ``spared``, and of ``fresh`` only those that are too old; returns their ids."""
        ...

    async def excess(self) -> int:
        """Bytes that the journal and what is kept beside it take over the bounds of the disk; 0: none."""
        ...

    @property
    def refusal(self) -> str | None:
        """The reason that new episodes are refused now (no room, a disk that takes no records), as a sentence;
        None: they are taken. Reading and deleting work all the same."""
        ...

    async def close(self) -> None:
        """Flushes, syncs, releases the directory's lock; safe to call twice."""
        ...
