"""Entries of the index: the position of a record and the facts that decisions need, without its payload.

A position is one integer, ``segment << 40 | offset``, so that the order of positions is the order of records.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from turnstile.models import EpisodeStatus
from turnstile_server.journal.protocol import RecordType

OFFSET_BITS = 40
ENDED_STATUSES = frozenset(status.value for status in EpisodeStatus if status.ended)
UNKNOWN_END = float("inf")
"""``ended_at`` of an ended episode whose record does not say when."""


def position(segment: int, offset: int) -> int:
    return segment << OFFSET_BITS | offset


def place(at: int) -> tuple[int, int]:
    """``(segment, offset)`` of a position."""
    return at >> OFFSET_BITS, at & ((1 << OFFSET_BITS) - 1)


@dataclass(frozen=True, slots=True)
class RecordFacts:
    """Facts of a record's payload.

    ``ended_at`` is in Unix seconds, for EPISODE records of ended episodes only. ``before`` is for EPISODE_DELETED
    only: the position below which the episode's records are dead; None means the tombstone's own position.
    """

    ended_at: float | None = None
    before: int | None = None


NO_FACTS = RecordFacts()


def needs_meta(record_type: int) -> bool:
    """True if the facts of such a record are in its meta. A scan need not parse the meta of other types."""
    return record_type in (RecordType.EPISODE, RecordType.EPISODE_DELETED)


def facts_of(record_type: int, meta: Mapping[str, Any]) -> RecordFacts:
    if record_type == RecordType.EPISODE:
        return RecordFacts(ended_at=_ended_at(meta))
    if record_type == RecordType.EPISODE_DELETED:
        before = meta.get("before")
        return RecordFacts(before=before if isinstance(before, int) else None)
    return NO_FACTS


def _ended_at(meta: Mapping[str, Any]) -> float | None:
    if meta.get("status") not in ENDED_STATUSES:
        return None
    timings = meta.get("timings")
    if not isinstance(timings, Mapping) or not isinstance(timings.get("created_at"), int | float):
        return UNKNOWN_END
    return float(timings["created_at"]) + float(timings.get("ended_s") or 0.0)


@dataclass(frozen=True, slots=True)
class IndexEntry:
    """One stored record. ``length`` counts its header."""

    type: int
    episode_id: str
    position: int
    length: int
    facts: RecordFacts = NO_FACTS

    @property
    def dead_below(self) -> int:
        """For a tombstone: the position below which records of its episode are dead."""
        return self.position if self.facts.before is None else self.facts.before


@dataclass(frozen=True, slots=True)
class RecordLocation:
    """The location of a stored record. ``length`` is in bytes and counts its header."""

    position: int
    length: int
    type: int


@dataclass(frozen=True, slots=True)
class SegmentMark:
    """The bytes of ``segment`` below ``synced_to`` are on stable storage, and all their entries came before this
    mark."""

    segment: int
    nonce: int
    synced_to: int
    damaged_bytes: int = 0


Journaled = IndexEntry | SegmentMark
