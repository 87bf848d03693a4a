"""All episodes of the server: created, looked up, listed, exported, deleted.

Owns the register of running episodes; the life of each belongs to its ``EpisodeRun``. What must hold: a key opens
only its own, running episode; reading about an episode changes nothing; a creation is durable before it is
answered."""

from __future__ import annotations

import hashlib
import logging
import math
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import TypeVar

import anyio
import anyio.abc
import anyio.to_thread

from turnstile.models import (
    AuditReport,
    EndedBy,
    Episode,
    EpisodeCreated,
    EpisodeRequest,
    EpisodeStatus,
    LeaseState,
    Notice,
    NoticeType,
    RewardUpdate,
    TrainedRequest,
)
from turnstile_server.agents.registry import EXTERNAL
from turnstile_server.control.protocol import EpisodeEvent
from turnstile_server.data_dir import replay_folder, snapshot_folder, work_folder
from turnstile_server.episodes.accounting import count_end
from turnstile_server.episodes.amendments import Amendments
from turnstile_server.episodes.archive import Archive
from turnstile_server.episodes.bounds import EpisodeBounds
from turnstile_server.episodes.broadcast import Broadcast, changes_of
from turnstile_server.episodes.drain import Drain
from turnstile_server.episodes.episode_table import Creation
from turnstile_server.episodes.fork_point import ForkPoint
from turnstile_server.episodes.groups import EpisodeGroups
from turnstile_server.episodes.keys import new_nonce
from turnstile_server.episodes.leases import Leases
from turnstile_server.episodes.outcome import Outcome
from turnstile_server.episodes.parts import EpisodeParts
from turnstile_server.episodes.places import Places, beyond_places
from turnstile_server.episodes.plan import Plan, check_engine, check_fork, forked, new_episode, plan_episode
from turnstile_server.episodes.reader import EpisodeReader, check_trainable
from turnstile_server.episodes.regrade import RegradeParts, Regrader
from turnstile_server.episodes.resumption import ResumedEpisode, Resumption
from turnstile_server.episodes.retention import KeptBeside, Retention
from turnstile_server.episodes.reward_service import EpisodeRewards
from turnstile_server.episodes.run import EpisodeRun, RunParts
from turnstile_server.episodes.snapshot_store import SnapshotStore
from turnstile_server.episodes.snapshots import Snapshots
from turnstile_server.episodes.staleness import StalenessWatcher
from turnstile_server.episodes.store import Stored, unchanging
from turnstile_server.episodes.trained import with_step
from turnstile_server.episodes.work_store import WorkStore
from turnstile_server.errors import Conflict, Gone, JournalUnavailable, NotFound, QueueFull, WrongKey
from turnstile_server.gate.session import EpisodeSession
from turnstile_server.journal.records import exported_record
from turnstile_server.replay.recorder import Replays
from turnstile_server.replay.store import ReplayStore
from turnstile_server.tools.protocol import EpisodeTools

_LOG = logging.getLogger(__name__)

T = TypeVar("T")


class Episodes(EpisodeReader):
    """The register of all episodes. Implements the control API's EpisodeService, the gate's EpisodeDirectory and
    the MCP endpoint's ToolDirectory.

    Use as an async context manager: entering restores what the journal holds; leaving stops every run and leaves
    the unfinished episodes to the next start, which records them as ``server_restarted`` or resumes them.
    """

    def __init__(self, parts: EpisodeParts) -> None:
        settings = parts.settings
        self._parts = parts
        self._journal = parts.journal
        self._keys = parts.keys
        self._settings = settings.episodes
        self._bounds = settings.episodes.bounds_of(EpisodeBounds)
        self._metrics = parts.metrics
        self._running: dict[str, EpisodeRun] = {}
        work, snapshots = work_folder(settings.data_dir), snapshot_folder(settings.data_dir)
        spare_bytes = 2 * settings.journal.min_free_bytes
        self._works = WorkStore(work, self._settings, spare_bytes, parts.metrics.work_kept)
        store = SnapshotStore(snapshots, self._settings, spare_bytes)
        self.snapshots = Snapshots(store, parts.toolbox, settings, parts.metrics)
        self.replays = ReplayStore(replay_folder(settings.data_dir), self._settings, spare_bytes, self._running)
        self._staleness = StalenessWatcher(parts.versions, lambda: list(self._running.values()))
        self._run_parts = RunParts(
            parts.journal,
            parts.pipeline,
            parts.backends,
            settings,
            places=Places(self._settings.places, self._bounds.oldest_every, beyond_places(settings)),
            versions=parts.versions,
            works=self._works,
            snapshots=self.snapshots,
            replays=Replays(self.replays, parts.toolbox.paused, self._settings),
            changed=self._changed,
            weights=self._staleness.sampled,
        )
        self._groups = EpisodeGroups(self._bounds.remembered_groups)
        self._leases = Leases(self._bounds.watch_interval_s, time.monotonic())
        self._resumption = Resumption(parts.backends, settings, parts.engine, parts.template_hash)
        takes_up = self._resumption.takes
        archive = Archive(parts.journal, self._bounds.cached_trees, self._works, parts.journal.append, takes_up)
        super().__init__(parts.journal, archive, self._works, self._running, settings)
        kept = KeptBeside(self._works, store, self.replays)
        self._retention = Retention(parts.journal, archive, kept, self._bounds, partial(self.notify, "retention"))
        limits = (self._bounds.max_subscribers, self._bounds.subscriber_queue, self._bounds.kept_events)
        self._broadcast = Broadcast(*limits)
        amendments = self._amendments = Amendments(parts.journal, archive, self._broadcast.publish)
        self.regrades = Regrader(
            RegradeParts(
                parts.backends,
                self._works,
                amendments,
                parts.metrics,
                self._now,
                settings.grading.places,
                self._bounds.kept_regrades,
            )
        )
        self._creating = anyio.Lock()
        self.drain = Drain(lambda: self.open_count, self._creating, self._bounds.drained_linger_s)
        self._room_wanted = False
        """New episodes are refused, and something changed that may allow retention to make room."""
        self._rewards = EpisodeRewards(
            archive, amendments, self._running, self._exports, self._bounds.max_reward_changes
        )
        self._tasks: anyio.abc.TaskGroup = anyio.create_task_group()

    async def __aenter__(self) -> Episodes:
        await self._works.open()
        await self.snapshots.store.open()
        await self.replays.open()
        await self._archive.restore()
        await self._retention.sweep()
        await self._tasks.__aenter__()
        for resumed in self._resumption.found:
            self._start(resumed.stored, resumed.plan, {}, resumed)
        self._tasks.start_soon(self._watch)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._broadcast.close()
        for run in self._running.values():
            run.interrupt()
        self._tasks.cancel_scope.cancel()
        try:
            await self._tasks.__aexit__(None, None, None)
        finally:
            self._archive.close()

    # For agents: the gate and the MCP endpoint

    def open_episode(self, episode_id: str, key: str) -> EpisodeSession:
        return self._opened(episode_id, key).session

    def open_tools(self, episode_id: str, key: str) -> EpisodeTools:
        return self._opened(episode_id, key).tools

    def _opened(self, episode_id: str, key: str) -> EpisodeRun:
        run = self._running.get(episode_id)
        nonce = self._keys.nonce(episode_id, key)
        if run is not None and nonce == run.key_nonce:
            return run
        if nonce is not None:  # only this server makes such a key, so the episode existed
            raise Gone(f"episode {episode_id} has ended; its key is dead")
        if episode_id in self._archive:
            raise WrongKey(f"the key does not open episode {episode_id}; each episode has a key of its own")
        raise NotFound(f"there is no episode {episode_id}")

    # For the trainer: the control API

    async def create(
        self, request: EpisodeRequest, agent_url: str | None = None, fork: ForkPoint | None = None
    ) -> tuple[EpisodeCreated, bool]:
        asked = request.model_dump_json(exclude={"lease", "traceparent"})
        asked += "" if fork is None else fork.origin.model_dump_json()
        digest = hashlib.sha256(asked.encode()).hexdigest()
        async with self._creating:  # two equal creations at once must become one episode
            earlier = self._archive.creation(request.idempotency_key)
            if earlier is not None:
                if earlier.request_digest != digest:
                    raise Conflict("idempotency_key was used before, for another request")
                episode = await self.get(earlier.episode_id)
                return self._created(episode, earlier.key_nonce, agent_url), False
            if request.lease is not None:
                self._leases.check(request.lease.lease_id)
            await self._parts.backends.tasks.prefetch(request.task.id)
            plan = plan_episode(request, self._parts.backends, self._parts.settings)
            plan = plan if fork is None else forked(plan, fork)
            stored = Stored(self._admitted(request, plan), new_nonce(), request.idempotency_key, digest)
            with anyio.CancelScope(shield=True):  # a caller that goes away leaves no episode only in the journal
                await self._journal.append(stored.record())
            self._archive.created(stored)
            self._start(stored, plan, request.env)
            if request.lease is not None:
                self._leases.hold(request.lease, stored.episode.episode_id, time.monotonic())
        return self._created(stored.episode, stored.key_nonce, agent_url), True

    def _start(
        self, stored: Stored, plan: Plan, env: Mapping[str, str], resumed: ResumedEpisode | None = None
    ) -> None:
        """Makes a stored episode visible and starts its owner task. ``resumed``: where it goes on from."""
        key = self._keys.key(stored.episode.episode_id, stored.key_nonce)
        group = self._groups.of(stored.episode.group_id, time.monotonic())
        self._groups.opened(group)
        run = EpisodeRun(stored, plan, group, key, env, self._run_parts, resumed)
        self._running[run.episode_id] = run
        if resumed is not None:
            self._staleness.sampled(run)
        self._metrics.episode_moved(None, run.episode.status)
        self._broadcast.publish(run.episode)
        self._tasks.start_soon(run.run_to_end)

    @asynccontextmanager
    async def held(self, episode_id: str) -> AsyncIterator[None]:
        """The episode is not deleted while the block runs. Raises NotFound."""
        async with self._archive.changing:
            self._now(episode_id)
            yield

    def created_with(self, idempotency_key: str | None) -> Creation | None:
        """The earlier creation with this key, if there was one."""
        return self._archive.creation(idempotency_key)

    def check_free(self, requests: Sequence[EpisodeRequest]) -> None:
        """Raises QueueFull where they are too many, Conflict where an id of theirs is taken, ServerDraining."""
        self._check_room(len(requests))
        for request in requests:
            self._check_id(request.episode_id)

    def _check_id(self, episode_id: str | None) -> None:
        if episode_id is not None and episode_id in self._archive:
            raise Conflict(f"episode_id {episode_id} is taken")

    def _check_room(self, count: int) -> None:
        """Raises QueueFull where ``count`` further episodes are too many, ServerDraining where none is taken."""
        self.drain.check()
        if len(self._running) + count > self._settings.max_open:
            message = f"{len(self._running)} episodes are open, the server's limit (episodes.max_open)"
            raise QueueFull(message, retry_after_s=5.0)

    def _admitted(self, request: EpisodeRequest, plan: Plan) -> Episode:
        self._check_room(1)
        refusal = self._journal.refusal
        if refusal is not None:
            raise JournalUnavailable(f"the journal takes no new episodes: {refusal}", retry_after_s=5.0)
        settings, sampling = self._parts.settings, self._parts.settings.sampling
        can = self._parts.engine.capabilities
        check_engine(request, sampling, settings.engine.kind, can)
        check_fork(plan.fork, self._parts.template_hash)
        episode = new_episode(request, plan, sampling, self._settings, can)
        self._check_id(episode.episode_id)
        bound = None if episode.staleness is None else episode.staleness.bound
        self._staleness.admit(bound, self._groups.of(episode.group_id, time.monotonic()))
        return episode

    def _created(self, episode: Episode, key_nonce: str, agent_url: str | None) -> EpisodeCreated:
        url = f"{agent_url or self._parts.agent_url}/e/{episode.episode_id}"
        external = episode.agent == EXTERNAL
        return EpisodeCreated(
            episode_id=episode.episode_id,
            status=episode.status,
            model_url=url,
            tool_url=f"{url}/mcp",
            episode_key=self._keys.key(episode.episode_id, key_nonce) if external else None,
        )

    async def finish(self, episode_id: str) -> Episode:
        """Waits for a grading at most ``episodes.finish_wait_s``; the episode is ``grading`` then."""
        run = self._running.get(episode_id)
        if run is not None:
            run.request_stop(Outcome(EpisodeStatus.COMPLETED, by=EndedBy.REQUEST))
            with anyio.move_on_after(self._settings.finish_wait_s if run.graded else math.inf):
                await run.wait_until_stored()
        return await self.get(episode_id)

    async def cancel(self, episode_id: str) -> Episode:
        run = self._running.get(episode_id)
        if run is not None:
            run.request_stop(Outcome(EpisodeStatus.CANCELLED, by=EndedBy.REQUEST))
            await run.wait_until_stored()
        return await self.get(episode_id)

    def renew_lease(self, lease_id: str, lease_s: float) -> LeaseState:
        return self._leases.renew(lease_id, lease_s, time.monotonic())

    async def reward(self, episode_id: str, update: RewardUpdate) -> Episode:
        return await self._rewards.give(episode_id, update)

    async def trained(self, episode_id: str, told: TrainedRequest) -> Episode:
        now = time.time()
        if told.used:
            check_trainable(await self.get(episode_id))
        return await self._amendments.amend(
            episode_id, lambda episode: with_step(episode, told, self._parts.versions, now=now)
        )

    async def delete(self, episode_id: str) -> None:
        await self.cancel(episode_id)
        await self._retention.delete(episode_id)
        self.drain.fetched(episode_id)
        self._room_wanted = self._journal.refusal is not None

    def fetched(self, episode_id: str) -> None:
        self.drain.fetched(episode_id)
        self._archive.touch(episode_id, time.monotonic())
        if self._archive.fetched(episode_id):
            self._journal.append_soon(exported_record(episode_id))
            self._room_wanted = self._journal.refusal is not None

    @property
    def refusal(self) -> str | None:
        return self.drain.refusal or self._journal.refusal

    @property
    def draining(self) -> bool:
        return self.drain.begun

    async def audit(self, episode_id: str) -> AuditReport:
        episode, forest = await self.exported(episode_id)
        check_trainable(episode)
        return await self._parts.auditor.audit(unchanging(episode, forest), forest.facts(episode), self._exports)

    def notify(self, kind: NoticeType, message: str, counts: Mapping[str, int]) -> None:
        """Tells the readers of ``GET /events`` something that is no episode's."""
        self._broadcast.notify(Notice(type=kind, message=message, at=time.time(), counts=dict(counts)))

    def subscribe(self, after: str | None = None) -> AsyncIterator[EpisodeEvent]:
        return self._broadcast.subscribe(after)

    def changes(self) -> AsyncIterator[Episode]:
        return changes_of(self._broadcast.subscribe())

    # Called by the runs

    def _changed(self, run: EpisodeRun, before: EpisodeStatus) -> None:
        """A change of status; an end is durable by now."""
        episode = run.episode
        if episode.status.ended:
            del self._running[episode.episode_id]
            self._leases.ended(episode.episode_id)
            self._groups.ended(run.staleness.group)
            self._archive.add_ended(episode, run.forest)
            self.drain.ended(episode.episode_id)
            self._archive.touch(episode.episode_id, time.monotonic())
            if episode.work is None and episode.episode_id in self._works:  # it was not to be kept, after all
                self._tasks.start_soon(self._works.remove, [episode.episode_id])
            count_end(self._metrics, episode, self._settings.trained_share_alert)
        else:
            self._archive.moved(episode.episode_id, episode.status)
        self._metrics.episode_moved(before, episode.status)
        self._broadcast.publish(episode)

    async def _watch(self) -> None:
        """Has the runs check their limits of time, ends those whose lease has lapsed, and applies the journal's
        retention."""
        next_retention = time.monotonic()
        while True:
            for run in list(self._running.values()):
                run.check_limits()
            self._end_disowned()
            if self._room_wanted or time.monotonic() >= next_retention:
                self._room_wanted = False
                await self._retention.apply()
                pause_s = self._bounds.retention_interval_s
                if self._journal.refusal is not None:
                    pause_s = min(pause_s, self._bounds.retention_retry_s)
                next_retention = time.monotonic() + pause_s
            await anyio.sleep(self._bounds.watch_interval_s)

    def _end_disowned(self) -> None:
        """An episode that is graded already ends soon by itself, and its result is kept."""
        for lapse in self._leases.lapsed(time.monotonic()):
            _LOG.warning("%d episodes are cancelled: %s", len(lapse.episodes), lapse.error.message)
            for run in [self._running[each] for each in lapse.episodes if each in self._running]:
                if run.episode.status is not EpisodeStatus.GRADING:
                    run.request_stop(Outcome(EpisodeStatus.CANCELLED, lapse.error))
