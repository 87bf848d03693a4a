"""The SQLite index of where each record lies, and the choice of episodes that retention deletes.

It is derived from the segments alone, so it may lag, vanish or be damaged. Only the journal's index thread uses
it. What must hold: applying the same entries in the order of the segments gives the same answers, whether record
by record, after a crash from the last mark, or all over again. A record below a tombstone of its episode is dead.
The table ``dead`` names the segments that still hold dead records, so that their tombstone outlives them.
"""

from __future__ import annotations

import contextlib
import sqlite3
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from turnstile_server.journal.entries import IndexEntry, Journaled, RecordLocation, SegmentMark, place, position
from turnstile_server.journal.protocol import RecordType

INDEX_NAME = "index.sqlite3"
VERSION = 1
DAY_S = 86_400.0

_SCHEMA = """
CREATE TABLE segments (segment INTEGER PRIMARY KEY, nonce TEXT, indexed_to INTEGER, damaged_bytes INTEGER);
CREATE TABLE records (
    episode_id TEXT, position INTEGER, length INTEGER, type INTEGER, ended_at REAL,
    PRIMARY KEY (episode_id, position)
) WITHOUT ROWID;
CREATE INDEX by_position ON records (position);
CREATE INDEX states ON records (episode_id, position, length, ended_at) WHERE type = 1;
CREATE TABLE tombstones (position INTEGER PRIMARY KEY, episode_id TEXT, before INTEGER);
CREATE TABLE dead (episode_id TEXT, segment INTEGER, PRIMARY KEY (episode_id, segment)) WITHOUT ROWID;
CREATE INDEX dead_by_segment ON dead (segment);
"""


@dataclass(frozen=True, slots=True)
class LastState:
    """The last EPISODE record of an episode."""

    episode_id: str
    location: RecordLocation
    ended_at: float | None


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

    def __init__(self, directory: Path) -> None:
        self._path = directory / INDEX_NAME
        self._db = self._connect()

    @classmethod
    def open(cls, directory: Path) -> JournalIndex:
        """An existing index if SQLite finds it sound, else an empty one."""
        try:
            index = cls(directory)
        except sqlite3.DatabaseError:
            remove_index(directory)
            return cls(directory)
        if index.sound():
            return index
        index.close()
        remove_index(directory)
        return cls(directory)

    def _connect(self) -> sqlite3.Connection:
        db = sqlite3.connect(self._path, isolation_level=None, cached_statements=64)
        try:
            db.execute("PRAGMA journal_mode = WAL")
            db.execute("PRAGMA synchronous = NORMAL")
            (version,) = db.execute("PRAGMA user_version").fetchone()
            (tables,) = db.execute("SELECT count(*) FROM sqlite_master").fetchone()
            if version == 0 and tables == 0:
                db.executescript(f"BEGIN; {_SCHEMA} PRAGMA user_version = {VERSION}; COMMIT;")
        except BaseException:
            db.close()
            raise
        return db

    def sound(self) -> bool:
        try:
            (version,) = self._db.execute("PRAGMA user_version").fetchone()
            (verdict,) = self._db.execute("PRAGMA quick_check(1)").fetchone()
            return bool(version == VERSION and verdict == "ok")
        except sqlite3.DatabaseError:
            return False

    def close(self) -> None:
        self._db.close()

    # -- keeping it up to date -------------------------------------------------------------------------------

    def apply(self, items: Sequence[Journaled]) -> None:
        """All of it or nothing."""
        with self._transaction():
            for item in items:
                if isinstance(item, SegmentMark):
                    self._mark(item)
                elif item.type == RecordType.EPISODE_DELETED:
                    self._bury(item)
                else:
                    self._db.execute(
                        "INSERT OR REPLACE INTO records VALUES (?, ?, ?, ?, ?)",
                        (item.episode_id, item.position, item.length, item.type, item.facts.ended_at),
                    )

    def take(self, unindexed: UnindexedEntries) -> None:
        """Applies what the writer stored; on an error it stays unindexed."""
        items = unindexed.snapshot()
        if items:
            self.apply(items)
            unindexed.drop(len(items))

    def cut(self, segment: int, offset: int) -> None:
        """Forgets everything at and behind this place, for a scan from there."""
        at = position(segment, offset)
        with self._transaction():
            self._db.execute("DELETE FROM records WHERE position >= ?", (at,))
            self._db.execute("DELETE FROM tombstones WHERE position >= ?", (at,))
            self._db.execute("DELETE FROM dead WHERE segment > ?", (segment,))
            self._db.execute("DELETE FROM segments WHERE segment > ?", (segment,))

    def forget_segment(self, segment: int) -> None:
        low, high = position(segment, 0), position(segment + 1, 0)
        with self._transaction():
            self._db.execute("DELETE FROM records WHERE position >= ? AND position < ?", (low, high))
            self._db.execute("DELETE FROM tombstones WHERE position >= ? AND position < ?", (low, high))
            self._db.execute("DELETE FROM dead WHERE segment = ?", (segment,))
            self._db.execute("DELETE FROM segments WHERE segment = ?", (segment,))

    def _mark(self, mark: SegmentMark) -> None:
        self._db.execute(
            "INSERT INTO segments VALUES (?, ?, ?, ?) ON CONFLICT (segment) DO UPDATE SET "
            "nonce = excluded.nonce, indexed_to = excluded.indexed_to, "
            "damaged_bytes = damaged_bytes + excluded.damaged_bytes",
            (mark.segment, f"{mark.nonce:016x}", mark.synced_to, mark.damaged_bytes),
        )

    def _bury(self, tombstone: IndexEntry) -> None:
        key = (tombstone.episode_id, tombstone.dead_below)
        rows = self._db.execute("SELECT position FROM records WHERE episode_id = ? AND position < ?", key)
        segments = {place(at)[0] for (at,) in rows}
        self._db.executemany(
            "INSERT OR IGNORE INTO dead VALUES (?, ?)", [(tombstone.episode_id, segment) for segment in segments]
        )
        self._db.execute("DELETE FROM records WHERE episode_id = ? AND position < ?", key)
        self._db.execute("INSERT OR REPLACE INTO tombstones VALUES (?, ?, ?)", (tombstone.position, *key))

    def _transaction(self) -> contextlib.AbstractContextManager[None]:
        return _transaction(self._db)

    # -- answers ---------------------------------------------------------------------------------------------

    def segments(self) -> dict[int, SegmentMark]:
        rows = self._db.execute("SELECT segment, nonce, indexed_to, damaged_bytes FROM segments")
        return {row[0]: SegmentMark(row[0], int(row[1], 16), row[2], row[3]) for row in rows}

    def locations(self, episode_id: str, unindexed: Sequence[Journaled] = ()) -> list[RecordLocation]:
        """Living records of an episode, in order, counting what is not indexed yet."""
        rows = self._db.execute(
            "SELECT position, length, type FROM records WHERE episode_id = ? ORDER BY position", (episode_id,)
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

    def states(self) -> list[LastState]:
        """Every living episode's last state, by the age of its first."""
        rows = self._db.execute(
            "SELECT episode_id, max(position), length, ended_at, first FROM records JOIN "
            "(SELECT episode_id AS id, min(position) AS first FROM records WHERE type = 1 GROUP BY episode_id) "
            "ON episode_id = id WHERE type = 1 GROUP BY episode_id ORDER BY first"
        )
        return [LastState(row[0], RecordLocation(row[1], row[2], RecordType.EPISODE), row[3]) for row in rows]

    def sizes(self) -> dict[str, int]:
        """Living bytes by episode."""
        return dict(self._db.execute("SELECT episode_id, sum(length) FROM records GROUP BY episode_id"))

    def next_removable(self) -> int | None:
        """The oldest closed segment without damage in which nothing lives."""
        row = self._db.execute(
            "SELECT segment FROM segments WHERE segment < (SELECT max(segment) FROM segments) "
            "AND damaged_bytes = 0 AND NOT EXISTS (SELECT 1 FROM records WHERE position >= segment << 40 "
            "AND position < (segment + 1) << 40) ORDER BY segment LIMIT 1"
        ).fetchone()
        return None if row is None else row[0]

    def tombstones_needed(self, segment: int) -> list[tuple[str, int]]:
        """``(episode_id, before)`` of tombstones in ``segment`` whose dead records lie in other segments too."""
        rows = self._db.execute(
            "SELECT episode_id, max(before) FROM tombstones t WHERE position >= ? AND position < ? AND EXISTS "
            "(SELECT 1 FROM dead d WHERE d.episode_id = t.episode_id AND d.segment != ?) GROUP BY episode_id",
            (position(segment, 0), position(segment + 1, 0), segment),
        )
        return [(row[0], row[1]) for row in rows]


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


def remove_index(directory: Path) -> None:
    for suffix in ("", "-wal", "-shm"):
        (directory / f"{INDEX_NAME}{suffix}").unlink(missing_ok=True)


def expired(
    states: Sequence[LastState],
    sizes: Mapping[str, int],
    now: float,
    retention_days: float | None,
    retention_bytes: int | None,
) -> list[str]:
    """Episodes that retention deletes, oldest first. Pure. ``states`` is ordered by age, ``now`` is Unix seconds.

    An episode that has not ended is never deleted, but its bytes count. An episode that ended at an unknown time
    has no age: only ``retention_bytes`` deletes it. ``retention_bytes`` bounds living bytes; the disk gets them
    back when the segments that hold them have no other episode.
    """
    ended = [state for state in states if state.ended_at is not None]
    chosen: dict[str, None] = {}
    if retention_days is not None:
        deadline = now - retention_days * DAY_S
        for state in ended:
            if state.ended_at is not None and state.ended_at < deadline:
                chosen[state.episode_id] = None
    if retention_bytes is not None:
        living = sum(size for episode_id, size in sizes.items() if episode_id not in chosen)
        for state in ended:
            if living <= retention_bytes:
                break
            if state.episode_id not in chosen:
                chosen[state.episode_id] = None
                living -= sizes.get(state.episode_id, 0)
    return list(chosen)
