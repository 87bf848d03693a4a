"""The index of where each record lies: SQLite in memory, derived from the segments alone.

Nothing of it is on disk, so no damage, full disk or foreign file can make it lie: every start builds it from the
segments, or from their summaries (``summaries``), which are checked as a whole. Only the journal's index thread
uses it. What must hold: applying the same entries in the order of the segments gives the same answers, whether
record by record or all over again. A record below a tombstone of its episode is dead. The table ``dead`` names the
segments that still hold dead records, so that their tombstone outlives them.
"""

from __future__ import annotations

import contextlib
import json
import sqlite3
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from turnstile_server.journal.entries import (
    OFFSET_BITS,
    IndexEntry,
    Journaled,
    RecordFacts,
    RecordLocation,
    SegmentMark,
    position,
)
from turnstile_server.journal.protocol import RecordType
from turnstile_server.journal.summaries import NO_PLACE, Summary

_SCHEMA = """
CREATE TABLE segments (
    segment INTEGER PRIMARY KEY, nonce TEXT DEFAULT '0', damaged INTEGER DEFAULT 0,
    records INTEGER DEFAULT 0, bytes INTEGER DEFAULT 0
);
CREATE TABLE names (episode INTEGER PRIMARY KEY, episode_id TEXT NOT NULL UNIQUE);
CREATE TABLE records (
    episode INTEGER, position INTEGER, length INTEGER, type INTEGER, ended_at REAL, PRIMARY KEY (episode, position)
) WITHOUT ROWID;
CREATE INDEX states ON records (episode, position, length, ended_at) WHERE type = 1;
CREATE INDEX exports ON records (episode) WHERE type = 6;
CREATE TABLE tombstones (position INTEGER PRIMARY KEY, episode INTEGER, before INTEGER, length INTEGER);
CREATE TABLE dead (episode INTEGER, segment INTEGER, PRIMARY KEY (episode, segment)) WITHOUT ROWID;
CREATE INDEX dead_by_segment ON dead (segment);
"""
_NEEDED = "EXISTS (SELECT 1 FROM dead d WHERE d.episode = t.episode AND d.segment != t.position >> 40)"
"""The condition that a tombstone ``t`` is needed: records that it holds dead lie in other segments too."""
_UNNAMED = (
    "episode NOT IN (SELECT episode FROM tombstones) "
    "AND NOT EXISTS (SELECT 1 FROM records r WHERE r.episode = names.episode) "
    "AND NOT EXISTS (SELECT 1 FROM dead d WHERE d.episode = names.episode)"
)
"""The condition that nothing of an episode is left: the names of all that ever were would never end."""


@dataclass(frozen=True, slots=True)
class LastState:
    """The last EPISODE record of an episode; ``exported``: a trainer has fetched the ended episode."""

    episode_id: str
    location: RecordLocation
    ended_at: float | None
    exported: bool = False


@dataclass(frozen=True, slots=True)
class SegmentUse:
    """The part of a segment that must stay. ``kept_bytes``: living records, and tombstones that are still
    needed."""

    segment: int
    living: int
    kept_bytes: int
    damaged_bytes: int


class UnindexedEntries:
    """Entries that the writer has stored and the index has not taken yet, in order. Both threads use it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._items: list[Journaled] = []

    def add(self, items: Iterable[Journaled]) -> None:
        with self._lock:
            self._items.extend(items)

    def snapshot(self) -> list[Journaled]:
        with self._lock:
            return list(self._items)

    def drop(self, count: int) -> None:
        with self._lock:
            del self._items[:count]


class JournalIndex:
    """The index of one directory. Every method may raise sqlite3.Error."""

    def __init__(self) -> None:
        self._db = sqlite3.connect(":memory:", isolation_level=None, cached_statements=64)
        self._db.executescript(_SCHEMA)

    def close(self) -> None:
        self._db.close()

    def _number(self, episode_id: str) -> int:
        found = self._known(episode_id)
        if found is None:
            self._db.execute("INSERT INTO names (episode_id) VALUES (?)", (episode_id,))
            (found,) = self._db.execute("SELECT last_insert_rowid()").fetchone()
        return int(found)

    def _known(self, episode_id: str) -> int | None:
        found = self._db.execute("SELECT episode FROM names WHERE episode_id = ?", (episode_id,)).fetchone()
        return None if found is None else int(found[0])

    # -- keeping it up to date -------------------------------------------------------------------------------

    def apply(self, items: Iterable[Journaled]) -> None:
        """All of it or nothing."""
        rows: list[tuple[int, int, int, int, float | None]] = []
        with _transaction(self._db):
            for item in items:
                if isinstance(item, SegmentMark):
                    self._mark(item)
                elif item.type == RecordType.EPISODE_DELETED:
                    self._insert(rows)
                    self._bury(item)
                else:
                    number = self._number(item.episode_id)
                    rows.append((number, item.position, item.length, item.type, item.facts.ended_at))
            self._insert(rows)

    def apply_summary(self, summary: Summary, mark: SegmentMark) -> None:
        """As ``apply`` with the summary's entries and its mark, without an object for each."""
        base = position(summary.segment, 0)
        rows: list[tuple[int, int, int, int, float | None]] = []
        with _transaction(self._db):
            numbers = [self._number(name) for name in summary.episodes]
            for offset, length, kind, episode, ended_at, before in summary.rows():
                if kind == RecordType.EPISODE_DELETED:
                    self._insert(rows)
                    facts = RecordFacts(before=None if before == NO_PLACE else before)
                    self._bury(IndexEntry(kind, summary.episodes[episode], base + offset, length, facts))
                else:
                    # NaN, which stands for none, is NULL in SQLite.
                    rows.append((numbers[episode], base + offset, length, kind, ended_at))
            rows.sort()  # in the order of the table's key, which is faster
            self._insert(rows)
            self._mark(mark)

    def replace(self, segment: int, items: Sequence[Journaled]) -> None:
        """The living records of ``segment`` moved within it: these are all its entries now. Its dead are gone."""
        low, high = position(segment, 0), position(segment + 1, 0)
        with _transaction(self._db):
            self._db.execute("DELETE FROM records WHERE position >= ? AND position < ?", (low, high))
        self.forget_segment(segment)
        self.apply(items)

    def _insert(self, rows: list[tuple[int, int, int, int, float | None]]) -> None:
        self._db.executemany("INSERT OR REPLACE INTO records VALUES (?, ?, ?, ?, ?)", rows)
        counts, sizes = Counter(row[1] >> OFFSET_BITS for row in rows), Counter[int]()
        for _, at, length, _, _ in rows:
            sizes[at >> OFFSET_BITS] += length
        self._count((segment, counts[segment], sizes[segment]) for segment in counts)
        rows.clear()

    def _count(self, changes: Iterable[tuple[int, int, int]]) -> None:
        self._db.executemany(
            "INSERT INTO segments (segment, records, bytes) VALUES (?, ?, ?) ON CONFLICT (segment) DO UPDATE SET "
            "records = records + excluded.records, bytes = bytes + excluded.bytes",
            changes,
        )

    def _mark(self, mark: SegmentMark) -> None:
        self._db.execute(
            "INSERT INTO segments (segment, nonce, damaged) VALUES (?, ?, ?) ON CONFLICT (segment) DO UPDATE SET "
            "nonce = excluded.nonce, damaged = max(damaged, excluded.damaged)",
            (mark.segment, f"{mark.nonce:x}", mark.damaged_bytes),
        )

    def _bury(self, tombstone: IndexEntry) -> None:
        number, before = self._number(tombstone.episode_id), tombstone.dead_below
        dying = self._db.execute(
            "SELECT position >> 40, -count(*), -sum(length) FROM records WHERE episode = ? AND position < ? "
            "GROUP BY position >> 40",
            (number, before),
        ).fetchall()
        self._db.executemany("INSERT OR IGNORE INTO dead VALUES (?, ?)", [(number, row[0]) for row in dying])
        self._count(dying)
        self._db.execute("DELETE FROM records WHERE episode = ? AND position < ?", (number, before))
        self._db.execute(
            "INSERT OR REPLACE INTO tombstones VALUES (?, ?, ?, ?)",
            (tombstone.position, number, before, tombstone.length),
        )

    def take(self, unindexed: UnindexedEntries) -> list[Journaled]:
        """Applies what the writer stored, and returns it; on an error it stays unindexed."""
        items = unindexed.snapshot()
        if items:
            self.apply(items)
            unindexed.drop(len(items))
        return items

    def forget_segment(self, segment: int) -> None:
        """The segment is gone, or will be described anew. Nothing in it lives."""
        low, high = position(segment, 0), position(segment + 1, 0)
        with _transaction(self._db):
            found = self._db.execute(
                "SELECT episode FROM tombstones WHERE position >= ? AND position < ? UNION "
                "SELECT episode FROM dead WHERE segment = ?",
                (low, high, segment),
            ).fetchall()
            self._db.execute("DELETE FROM tombstones WHERE position >= ? AND position < ?", (low, high))
            self._db.execute("DELETE FROM dead WHERE segment = ?", (segment,))
            self._db.execute("DELETE FROM segments WHERE segment = ?", (segment,))
            self._db.execute(
                f"DELETE FROM names WHERE episode IN (SELECT value FROM json_each(?)) AND {_UNNAMED}",
                (json.dumps([row[0] for row in found]),),
            )

    # -- answers ---------------------------------------------------------------------------------------------

    def marks(self) -> dict[int, SegmentMark]:
        rows = self._db.execute("SELECT segment, nonce, damaged FROM segments")
        return {row[0]: SegmentMark(row[0], int(row[1], 16), 0, row[2]) for row in rows}

    def locations(self, episode_id: str, unindexed: Sequence[Journaled] = ()) -> list[RecordLocation]:
        """Living records of an episode, in order, counting what is not indexed yet."""
        rows = self._db.execute(
            "SELECT position, length, type FROM records WHERE episode = ? ORDER BY position",
            (self._known(episode_id),),
        )
        found = {row[0]: RecordLocation(*row) for row in rows}
        for item in unindexed:
            if isinstance(item, SegmentMark) or item.episode_id != episode_id:
                continue
            if item.type == RecordType.EPISODE_DELETED:
                found = {at: location for at, location in found.items() if at >= item.dead_below}
            else:
                found[item.position] = RecordLocation(item.position, item.length, item.type)
        return [found[at] for at in sorted(found)]

    def episodes(self) -> list[str]:
        """Every episode with a living EPISODE or TURN record, by the age of the first EPISODE record; those
        without one (it is lost) by the age of their first turn."""
        rows = self._db.execute(
            "SELECT episode_id FROM names JOIN "
            "(SELECT episode, min(position) AS first FROM records WHERE type = 1 GROUP BY episode UNION ALL "
            "SELECT episode, min(position) FROM records r WHERE type = 2 AND NOT EXISTS "
            "(SELECT 1 FROM records s WHERE s.type = 1 AND s.episode = r.episode) GROUP BY episode) "
            "USING (episode) ORDER BY first"
        )
        return [row[0] for row in rows]

    def states(self) -> list[LastState]:
        """Every living episode's last state, by the age of its first."""
        rows = self._db.execute(
            "SELECT (SELECT episode_id FROM names n WHERE n.episode = id), max(position), length, ended_at, "
            "first, EXISTS (SELECT 1 FROM records e WHERE e.type = 6 AND e.episode = id) FROM records JOIN "
            "(SELECT episode AS id, min(position) AS first FROM records WHERE type = 1 GROUP BY episode) "
            "ON episode = id WHERE type = 1 GROUP BY episode ORDER BY first"
        )
        return [
            LastState(row[0], RecordLocation(row[1], row[2], RecordType.EPISODE), row[3], bool(row[5]))
            for row in rows
        ]

    def sizes(self) -> dict[str, int]:
        """Living bytes by episode."""
        return dict(
            self._db.execute(
                "SELECT episode_id, sum(length) FROM records JOIN names USING (episode) GROUP BY episode"
            )
        )

    def uses(self) -> list[SegmentUse]:
        """Every segment, the oldest first; the last is the one that is appended to."""
        rows = self._db.execute(
            "SELECT segment, records, bytes + coalesce((SELECT sum(length) FROM tombstones t WHERE "
            f"position >= segment << 40 AND position < (segment + 1) << 40 AND {_NEEDED}), 0), damaged "
            "FROM segments ORDER BY segment"
        )
        return [SegmentUse(*row) for row in rows]

    def tombstones_needed(self, segment: int) -> list[tuple[str, int]]:
        """``(episode_id, before)`` of tombstones in ``segment`` whose dead records lie in other segments too."""
        rows = self._db.execute(
            "SELECT episode_id, max(before) FROM tombstones t JOIN names USING (episode) "
            f"WHERE position >= ? AND position < ? AND {_NEEDED} GROUP BY episode",
            (position(segment, 0), position(segment + 1, 0)),
        )
        return list(rows)

    def kept_in(self, segment: int) -> list[RecordLocation]:
        """Living records and needed tombstones of a segment, in order."""
        within = (position(segment, 0), position(segment + 1, 0))
        rows = self._db.execute(
            "SELECT position, length, type FROM records WHERE position >= ? AND position < ? UNION ALL "
            f"SELECT position, length, 5 FROM tombstones t WHERE position >= ? AND position < ? AND {_NEEDED} "
            "ORDER BY position",
            within * 2,
        )
        return [RecordLocation(*row) for row in rows]

    def may_move(self, segment: int) -> bool:
        """True if records may move within the segment: no tombstone elsewhere draws its line between them."""
        (lines,) = self._db.execute(
            "SELECT count(*) FROM tombstones t WHERE before >> 40 = ? AND position >> 40 != ? AND EXISTS "
            "(SELECT 1 FROM records r WHERE r.episode = t.episode AND r.position >= t.before "
            "AND r.position < (? + 1) << 40)",
            (segment, segment, segment),
        ).fetchone()
        return bool(lines == 0)


@contextlib.contextmanager
def _transaction(db: sqlite3.Connection) -> Iterator[None]:
    db.execute("BEGIN IMMEDIATE")
    try:
        yield
        db.execute("COMMIT")
    except BaseException:
        if db.in_transaction:
            db.execute("ROLLBACK")
        raise
