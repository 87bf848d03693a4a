"""A row for each episode: its place in the listing, its creation, and when it has ended its record and summary.

What must hold: a page costs what it returns (and a search), whatever the filter and however many episodes there
are; an episode is on exactly the pages that its present status and its group belong to; and an episode that has
ended costs some hundred bytes (``benchmarks/ended_episodes.py``). So it is a table of SQLite in memory: objects of
Python would be several times as much, and a full disk could spoil a file.
"""

from __future__ import annotations

import sqlite3
import zlib
from typing import Any, NamedTuple

from turnstile.models import EpisodeStatus, EpisodeSummary, ForkOrigin

Filter = tuple[EpisodeStatus | None, str | None]
"""Status and group; None: any."""
_WINDOW = 1 << 15
"""Bytes of a dictionary that zlib looks back to."""
_SCHEMA = """
CREATE TABLE episodes (
    ordinal INTEGER PRIMARY KEY, episode_id TEXT NOT NULL UNIQUE, status TEXT NOT NULL, group_id TEXT,
    idempotency_key TEXT UNIQUE, key_nonce TEXT, request_digest TEXT, origin TEXT, continues TEXT,
    began REAL, ended REAL, fetched INTEGER NOT NULL DEFAULT 0
);
CREATE INDEX by_status ON episodes (status);
CREATE INDEX by_group_and_status ON episodes (group_id, status) WHERE group_id IS NOT NULL;
CREATE INDEX by_end ON episodes (ended) WHERE ended IS NOT NULL;
CREATE INDEX by_origin ON episodes (continues) WHERE continues IS NOT NULL;
CREATE TABLE texts (ordinal INTEGER PRIMARY KEY, record BLOB NOT NULL, summary BLOB NOT NULL);
CREATE TRIGGER gone AFTER DELETE ON episodes BEGIN DELETE FROM texts WHERE ordinal = old.ordinal; END;
"""
_ITS = "(SELECT ordinal FROM episodes WHERE episode_id = ?)"


class Creation(NamedTuple):
    """The part of a creation that recognises and answers the same request under one idempotency key."""

    episode_id: str
    key_nonce: str
    request_digest: str
    forked_from: ForkOrigin | None


class _Packer:
    """Compresses texts, each with the first one as its dictionary: those of one server are much alike (measured:
    to a tenth of their length and less, in some microseconds)."""

    def __init__(self) -> None:
        self._alike = b""

    def packed(self, text: bytes, beside: bytes = b"") -> bytes:
        """``beside``: what says much of the same; ``unpacked`` needs it, too."""
        self._alike = self._alike or text[-_WINDOW:]
        packer = zlib.compressobj(zdict=self._dictionary(beside))
        return packer.compress(text) + packer.flush()

    def unpacked(self, packed: bytes, beside: bytes = b"") -> bytes:
        return zlib.decompressobj(zdict=self._dictionary(beside)).decompress(packed)

    def _dictionary(self, beside: bytes) -> bytes:
        return (self._alike + beside)[-_WINDOW:]


class EpisodeTable:
    """Only one thread uses it. Ordinals are never used twice."""

    def __init__(self) -> None:
        self._db = sqlite3.connect(":memory:", isolation_level=None)
        self._db.executescript(_SCHEMA)
        self._next = 0
        self._records, self._summaries = _Packer(), _Packer()

    def close(self) -> None:
        """Idempotent."""
        self._db.close()

    def __contains__(self, episode_id: str) -> bool:
        return self._one("SELECT 1 FROM episodes WHERE episode_id = ?", episode_id) is not None

    def __len__(self) -> int:
        return int(self._db.execute("SELECT count(*) FROM episodes").fetchone()[0])

    def _one(self, statement: str, *parameters: Any) -> tuple[Any, ...] | None:
        found: tuple[Any, ...] | None = self._db.execute(statement, parameters).fetchone()
        return found

    # -- what changes ----------------------------------------------------------------------------------------

    def add(self, episode_id: str, status: EpisodeStatus, group_id: str | None) -> None:
        """Append a new episode, in place of one with this id: two folders that are read may hold the same one."""
        self.remove(episode_id)
        self._db.execute(
            "INSERT INTO episodes (ordinal, episode_id, status, group_id) VALUES (?, ?, ?, ?)",
            (self._next, episode_id, status, group_id),
        )
        self._next += 1

    def set_origin(self, episode_id: str, origin: ForkOrigin) -> None:
        """The episode began as a fork."""
        self._db.execute(
            "UPDATE episodes SET origin = ?, continues = ? WHERE episode_id = ?",
            (origin.model_dump_json(), origin.episode_id, episode_id),
        )

    def set_creation(self, episode_id: str, idempotency_key: str, key_nonce: str, request_digest: str) -> None:
        """The request that created the episode. Another one with this key is forgotten."""
        self._db.execute(
            "UPDATE episodes SET idempotency_key = NULL WHERE idempotency_key = ?", (idempotency_key,)
        )
        self._db.execute(
            "UPDATE episodes SET idempotency_key = ?, key_nonce = ?, request_digest = ? WHERE episode_id = ?",
            (idempotency_key, key_nonce, request_digest, episode_id),
        )

    def move(self, episode_id: str, status: EpisodeStatus) -> None:
        """Record the episode's new status."""
        self._db.execute("UPDATE episodes SET status = ? WHERE episode_id = ?", (status, episode_id))

    def end(self, summary: EpisodeSummary, record: bytes) -> None:
        """Keep the summary and the record (JSON) of an ended episode, in place of earlier ones."""
        text = summary.model_dump_json().encode()
        packed = self._records.packed(record), self._summaries.packed(text, record)
        began, ended = summary.created_at, summary.ended_at
        self._db.execute(
            "UPDATE episodes SET status = ?, began = ?, ended = ? WHERE episode_id = ?",
            (summary.status, began, began if ended is None else ended, summary.episode_id),
        )
        self._db.execute(
            f"INSERT OR REPLACE INTO texts SELECT ordinal, ?, ? FROM episodes WHERE ordinal = {_ITS}",
            (*packed, summary.episode_id),
        )

    def fetch(self, episode_id: str) -> None:
        """A trainer has an export of the episode."""
        self._db.execute("UPDATE episodes SET fetched = 1 WHERE episode_id = ?", (episode_id,))

    def remove(self, episode_id: str) -> None:
        """Forget the episode. No-op if it is unknown."""
        self._db.execute("DELETE FROM episodes WHERE episode_id = ?", (episode_id,))

    # -- one episode -----------------------------------------------------------------------------------------

    def ordinal(self, episode_id: str) -> int:
        """Its place in the listing. Raises KeyError for an unknown episode."""
        found = self._one("SELECT ordinal FROM episodes WHERE episode_id = ?", episode_id)
        if found is None:
            raise KeyError(episode_id)
        return int(found[0])

    def record(self, episode_id: str) -> bytes | None:
        """Of an ended episode, as JSON; None for any other."""
        found = self._one(f"SELECT record FROM texts WHERE ordinal = {_ITS}", episode_id)
        return None if found is None else self._records.unpacked(found[0])

    def summary(self, episode_id: str) -> EpisodeSummary | None:
        """Of an ended episode; None for any other."""
        found = self._one(f"SELECT summary, record FROM texts WHERE ordinal = {_ITS}", episode_id)
        if found is None:
            return None
        text = self._summaries.unpacked(found[0], self._records.unpacked(found[1]))
        return EpisodeSummary.model_validate_json(text)

    def has_ended(self, episode_id: str) -> bool:
        return self._one(f"SELECT 1 FROM texts WHERE ordinal = {_ITS}", episode_id) is not None

    def is_fetched(self, episode_id: str) -> bool:
        return self._one("SELECT 1 FROM episodes WHERE episode_id = ? AND fetched", episode_id) is not None

    def origin(self, episode_id: str) -> ForkOrigin | None:
        """Of a fork; None for any other."""
        found = self._one("SELECT origin FROM episodes WHERE episode_id = ?", episode_id)
        return None if found is None or found[0] is None else ForkOrigin.model_validate_json(found[0])

    def creation(self, idempotency_key: str) -> Creation | None:
        """The creation with this key."""
        found = self._one(
            "SELECT episode_id, key_nonce, request_digest, origin FROM episodes WHERE idempotency_key = ?",
            idempotency_key,
        )
        if found is None:
            return None
        episode_id, nonce, digest, origin = found
        return Creation(episode_id, nonce, digest, origin and ForkOrigin.model_validate_json(origin))

    # -- many ------------------------------------------------------------------------------------------------

    @property
    def head(self) -> int:
        """The ordinal that the next new episode gets."""
        return self._next

    def page(self, found_by: Filter, before: int | None, limit: int) -> tuple[list[str], int | None]:
        """Ids of at most ``limit`` episodes, newest first, and the ``before`` of the next page (None: no more)."""
        found = self.newest(found_by, before, limit + 1)
        chosen = found[:limit]
        return [episode_id for _, episode_id in chosen], chosen[-1][0] if len(found) > limit else None

    def newest(self, found_by: Filter, before: int | None, limit: int = -1) -> list[tuple[int, str]]:
        """Ordinals and ids of the ``limit`` (-1: all) newest episodes that the filter finds, newest first."""
        status, group_id = found_by
        if before is not None:
            before = max(0, min(before, self._next))  # a caller's number may be longer than SQLite's
        wanted = {"status = ?": status, "group_id = ?": group_id, "ordinal < ?": before}
        given = {condition: value for condition, value in wanted.items() if value is not None}
        where = f"WHERE {' AND '.join(given)} " if given else ""
        statement = f"SELECT ordinal, episode_id FROM episodes {where}ORDER BY ordinal DESC LIMIT ?"
        return [(ordinal, each) for ordinal, each in self._db.execute(statement, (*given.values(), limit))]

    def register(self) -> list[tuple[str, str | None, str | None]]:
        """Every episode with its group and its idempotency key, the oldest first."""
        rows = self._db.execute("SELECT episode_id, group_id, idempotency_key FROM episodes ORDER BY ordinal")
        return [(each, group_id, key) for each, group_id, key in rows]

    def alive_between(self, after: float, before: float) -> list[str]:
        """Ids of ended episodes that lived at some time between the two, in Unix seconds; the latest end first."""
        rows = self._db.execute(
            "SELECT episode_id FROM episodes WHERE ended >= ? AND began <= ? ORDER BY ended DESC, ordinal DESC",
            (after, before),
        )
        return [each for (each,) in rows]

    def continued(self) -> set[str]:
        """Ids of the episodes that forks continue."""
        rows = self._db.execute("SELECT DISTINCT continues FROM episodes WHERE continues IS NOT NULL")
        return {each for (each,) in rows}

    def forks_of(self, episode_id: str) -> list[str]:
        """Ids of the episodes that continue turns of this one, in the order of their names."""
        rows = self._db.execute(
            "SELECT episode_id FROM episodes WHERE continues = ? ORDER BY episode_id", (episode_id,)
        )
        return [each for (each,) in rows]
