"""Every episode's place in the listing, running ones included; records and trees of ended ones; idempotency keys.

Running episodes have only their status and their creation here; ``service`` holds their runs. The record of an
ended episode is kept in a table (``episode_table``); its tree is read from the journal and cached.

What must hold: one record that cannot be read spoils nothing. It is listed as a failed episode whose error
(``record_unreadable``) says what is wrong, its turns are read as far as they can be, and it can be deleted.
"""

from __future__ import annotations

import json
import logging
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import replace

import anyio
import anyio.to_thread
from pydantic import ValidationError
from pydantic_core import PydanticSerializationError

from turnstile.models import (
    Episode,
    EpisodeStatus,
    EpisodeSummary,
    ErrorInfo,
    ForkOrigin,
    KeptWork,
    NetworkReport,
    Turn,
    summary_of,
)
from turnstile_server.episodes.episode_table import Creation, EpisodeTable
from turnstile_server.episodes.store import (
    RECORD_UNREADABLE,
    DamagedRecord,
    Forest,
    Stored,
    network_of,
    rebuild,
    stored_of,
    unreadable_episode,
)
from turnstile_server.episodes.work_store import KeptWorks
from turnstile_server.errors import Conflict, JournalUnavailable, NotFound, ServerRestarted
from turnstile_server.journal.protocol import JournalReading, Record, RecordType

_LOG = logging.getLogger(__name__)

_RESTARTED = ErrorInfo(
    type=ServerRestarted.type,
    message="the server stopped while the episode ran; its turns are kept, submit it again",
    fault=ServerRestarted.fault,
)
_NOT_GRADED = _RESTARTED.model_copy(
    update={
        "message": "the server stopped while the episode was graded; its turns and its work are kept, grade it "
        "again (turnstile episodes regrade --apply)"
    }
)


class Archive:
    """``cached_trees``: how many trees of ended episodes stay in memory, the latest used ones. ``works``: in which
    the work of an episode may be that was graded when the server stopped. ``interrupted`` is handed the records of
    such ends, to store them. ``takes_up`` is asked first, with all records of an episode that ran and was not
    being graded, whether it goes on; None: none does."""

    def __init__(
        self,
        journal: JournalReading,
        cached_trees: int,
        works: KeptWorks,
        interrupted: Callable[[Record], Awaitable[object]] | None = None,
        takes_up: Callable[[Stored, Sequence[Record], Forest], bool] | None = None,
    ) -> None:
        self.changing = anyio.Lock()
        """Held while the record of an ended episode is changed or deleted."""
        self._journal = journal
        self._works = works
        self._interrupted = interrupted
        self._takes_up = takes_up
        self._cached_trees = cached_trees
        self._table = EpisodeTable()
        self._forests: OrderedDict[str, Forest] = OrderedDict()
        self._touched: OrderedDict[str, float] = OrderedDict()
        """When an episode ended or was fetched, in monotonic seconds; the earliest first, since this start."""

    def close(self) -> None:
        """Idempotent."""
        self._table.close()

    def __contains__(self, episode_id: str) -> bool:
        """True if there is such an episode: created and not deleted, running or ended."""
        return episode_id in self._table

    async def restore(self) -> None:
        """Take up every episode of the journal, oldest first. One that ran when the server stopped has failed;
        that end is stored, if the disk takes it and somebody stores it."""
        async for record in self._journal.episodes():
            try:
                if record.damage is not None:
                    raise DamagedRecord(record.damage)
                stored = stored_of(record)
            except (ValueError, KeyError, TypeError) as error:
                _LOG.error("the record of episode %s cannot be read: %s", record.episode_id, error)
                episode = unreadable_episode(record.episode_id, record.meta, error)
                self._table.add(record.episode_id, episode.status, episode.group_id)
                self.add_ended(episode)
                continue
            if not stored.episode.status.ended:
                inherited = await self._inherited(stored.episode.forked_from, anyio.CapacityLimiter(1))
                records = await self._journal.read(record.episode_id)
                forest = rebuild(records, inherited)
                work = await self._works.recovered(record.episode_id)
                if work is None and self._takes_up is not None and self._takes_up(stored, records, forest):
                    self.created(stored)
                    continue
                stored = await self._restarted(stored, forest, work)
            self.created(stored)
            self.add_ended(stored.episode)

    async def _restarted(self, stored: Stored, forest: Forest, work: KeptWork | None) -> Stored:
        """The episode that ran when the server stopped, as failed. ``work``: which it was being graded for."""
        episode_id = stored.episode.episode_id
        created_at = stored.episode.timings.created_at
        # Who only reads, perhaps years later, knows of no later time than that of the last turn.
        ended_at = time.time() if self._interrupted is not None else forest.last_turn_at or created_at
        ended_s = max(0.0, ended_at - created_at)
        timings = stored.episode.timings.model_copy(update={"ended_s": ended_s})
        error = _RESTARTED if work is None else _NOT_GRADED
        fields = {"status": EpisodeStatus.FAILED, "error": error, "timings": timings, "work": work}
        failed = replace(stored, episode=forest.counted(stored.episode.model_copy(update=fields)))
        if self._interrupted is None:
            return failed
        try:
            await self._interrupted(failed.record())
        except JournalUnavailable as refusal:  # the records can still be read; the next start tries again
            _LOG.error("the end of episode %s could not be stored: %s", episode_id, refusal.message)
        return failed

    def created(self, stored: Stored) -> None:
        """Append a new episode to the listing."""
        episode, key = stored.episode, stored.idempotency_key
        self._table.add(episode.episode_id, episode.status, episode.group_id)
        if episode.forked_from is not None:
            self._table.set_origin(episode.episode_id, episode.forked_from)
        if key is not None:
            self._table.set_creation(episode.episode_id, key, stored.key_nonce, stored.request_digest)

    def moved(self, episode_id: str, status: EpisodeStatus) -> None:
        """Record a running episode's new status for the listing."""
        self._table.move(episode_id, status)

    def add_ended(self, episode: Episode, forest: Forest | None = None) -> None:
        """Keep the record of an ended episode, and its ``forest`` for the exports that usually follow."""
        episode_id = episode.episode_id
        try:
            data = episode.model_dump_json()
        except PydanticSerializationError as error:
            _LOG.error("the record of episode %s has no JSON form: %s", episode_id, error)
            episode = unreadable_episode(episode_id, episode.model_dump(), error)
            data = episode.model_dump_json()
        self._table.end(summary_of(episode), data.encode())
        if forest is not None:
            self._keep(episode_id, forest)

    def forget(self, episode_id: str) -> None:
        """Remove a deleted episode. No-op if it is unknown."""
        self._table.remove(episode_id)
        self._forests.pop(episode_id, None)
        self._touched.pop(episode_id, None)

    def fetched(self, episode_id: str) -> bool:
        """A trainer has an export of the episode; True the first time that this is said of an ended one. Not of
        one that waits for its reward, after which it is fetched again."""
        if self._table.is_fetched(episode_id) or (episode := self.get(episode_id)) is None:
            return False
        if episode.late_rewards is not None and episode.late_rewards.pending:
            return False
        self._table.fetch(episode_id)
        return True

    def touch(self, episode_id: str, now: float) -> None:
        """An ended episode ended or was fetched at ``now``, in monotonic seconds."""
        if self._table.has_ended(episode_id):
            self._touched[episode_id] = now
            self._touched.move_to_end(episode_id)

    def touched_since(self, then: float) -> set[str]:
        """Ids of the episodes that ended or were fetched behind ``then``, which does not fall between calls."""
        while self._touched and next(iter(self._touched.values())) <= then:
            self._touched.popitem(last=False)
        return set(self._touched)

    def creation(self, idempotency_key: str | None) -> Creation | None:
        """The earlier creation with this key; None without a key."""
        return self._table.creation(idempotency_key) if idempotency_key is not None else None

    def get(self, episode_id: str) -> Episode | None:
        """The record of an ended episode; None for any other."""
        data = self._table.record(episode_id)
        if data is None:
            return None
        try:
            return Episode.model_validate_json(data)
        except ValidationError as error:
            _LOG.error("the record of episode %s cannot be read: %s", episode_id, error)
            return unreadable_episode(episode_id, json.loads(data), error)

    async def stored(self, episode_id: str) -> Stored:
        """The journal's own record of an ended episode. Raises NotFound where it is gone, Conflict where this
        version cannot read it."""
        records = await self._journal.read(episode_id)
        last = next((one for one in reversed(records) if one.type is RecordType.EPISODE), None)
        if last is None:
            raise NotFound(f"the records of episode {episode_id} are gone: it was deleted, or they were lost")
        try:
            return stored_of(last)
        except (ValueError, KeyError, TypeError) as error:
            raise Conflict(f"the record of episode {episode_id} cannot be read: {str(error)[:500]}") from error

    async def forest(self, episode_id: str, threads: anyio.CapacityLimiter) -> Forest:
        """The forest of an ended episode, from memory, or from the journal: built in one of ``threads``.

        Raises NotFound where retention or a deletion came first: an empty export would say that nothing was
        sampled.
        """
        forest = self._forests.get(episode_id)
        if forest is None:
            records = await self._journal.read(episode_id)
            if not records and not self._unreadable(episode_id):
                raise NotFound(f"the records of episode {episode_id} are gone: it was deleted, or they were lost")
            inherited = await self._inherited(self._table.origin(episode_id), threads)
            forest = await anyio.to_thread.run_sync(rebuild, records, inherited, limiter=threads)
        if self._table.has_ended(episode_id):  # a running one grows
            self._keep(episode_id, forest)
        return forest

    def cached(self, episode_id: str) -> Forest | None:
        """The forest of an ended episode, if it is in memory."""
        return self._forests.get(episode_id)

    def alive_at(self, at: float, slack_s: float) -> list[str]:
        """Ids of the ended episodes that lived at Unix time ``at``, or within ``slack_s`` of it; newest first."""
        return self._table.alive_between(at - slack_s, at + slack_s)

    async def network(self, episode_id: str) -> NetworkReport:
        """The network report of an ended episode, from its record."""
        report = network_of(await self._journal.read(episode_id))
        return report or NetworkReport(episode_id=episode_id)

    async def _inherited(self, origin: ForkOrigin | None, threads: anyio.CapacityLimiter) -> list[Turn]:
        """The turns that a fork began with; none where they are lost."""
        if origin is None or origin.turn_id is None:
            return []
        try:
            tree = (await self.forest(origin.episode_id, threads)).tree
        except NotFound as error:
            _LOG.error("the turns before a fork are lost: %s", error.message)
            return []
        return [node.turn for node in tree[origin.turn_id].path()] if origin.turn_id in tree else []

    @property
    def forked(self) -> Collection[str]:
        """Ids of the episodes that forks continue: they stay as long as those."""
        return self._table.continued()

    def forks_of(self, episode_id: str) -> list[str]:
        """Ids of the episodes that continue turns of this one."""
        return self._table.forks_of(episode_id)

    def _unreadable(self, episode_id: str) -> bool:
        """True if the episode is shown as one whose records cannot be read."""
        episode = self.get(episode_id)
        return episode is not None and episode.error is not None and episode.error.type == RECORD_UNREADABLE

    def _keep(self, episode_id: str, forest: Forest) -> None:
        self._forests[episode_id] = forest
        self._forests.move_to_end(episode_id)
        while len(self._forests) > self._cached_trees:
            self._forests.popitem(last=False)

    def summary(self, episode_id: str) -> EpisodeSummary | None:
        """The summary of an ended episode; None for any other."""
        try:
            return self._table.summary(episode_id)
        except ValidationError:  # that of what is told of a record that cannot be read
            episode = self.get(episode_id)
            return None if episode is None else summary_of(episode)

    def newest(
        self, status: EpisodeStatus | None, group_id: str | None, before: int | None
    ) -> list[tuple[int, str]]:
        """All episodes of a status and a group, the newest first, each with its ordinal."""
        return self._table.newest((status, group_id), before)

    @property
    def head(self) -> int:
        """The ordinal that the next new episode gets."""
        return self._table.head

    def ordinal(self, episode_id: str) -> int:
        """Its place in the listing. Raises KeyError."""
        return self._table.ordinal(episode_id)

    def register(self) -> list[tuple[str, str | None, str | None]]:
        """Every episode with its group and its idempotency key, the oldest first."""
        return self._table.register()

    def page(
        self, status: EpisodeStatus | None, group_id: str | None, before: int | None, limit: int
    ) -> tuple[list[str], int | None]:
        """Ids of at most ``limit`` episodes, newest first, and the ``before`` of the next page (None: no more)."""
        return self._table.page((status, group_id), before, limit)
