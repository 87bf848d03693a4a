"""The life of episodes: created, run, ended once, exported, deleted.

Owns every running episode. Holds: an episode ends exactly once; its end is durable before anyone is told; a key
opens only its own, running episode; nothing is ended by being asked about.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import anyio
import anyio.abc
import anyio.to_thread

from turnstile.models import (
    AuditReport,
    Episode,
    EpisodeCreated,
    EpisodePage,
    EpisodeRequest,
    EpisodeStatus,
    SampleSet,
    TokenForest,
    Turn,
)
from turnstile_server.agents.installer import Installer
from turnstile_server.agents.registry import EXTERNAL
from turnstile_server.capture import export_forest, export_samples
from turnstile_server.episodes.admission import new_episode
from turnstile_server.episodes.archive import Archive
from turnstile_server.episodes.auditor import Auditor
from turnstile_server.episodes.broadcast import Broadcast
from turnstile_server.episodes.director import Director
from turnstile_server.episodes.keys import EpisodeKeys, new_nonce
from turnstile_server.episodes.limits import call_limits
from turnstile_server.episodes.outcome import Outcome
from turnstile_server.episodes.plan import Plan, Planner
from turnstile_server.episodes.restore import restored
from turnstile_server.episodes.running import RunningEpisode
from turnstile_server.episodes.stage import Stage
from turnstile_server.episodes.store import Forest, Stored
from turnstile_server.episodes.tools import RunningTools
from turnstile_server.errors import (
    Conflict,
    Gone,
    NotFound,
    QueueFull,
    TurnstileError,
    Unauthorized,
)
from turnstile_server.gate.pipeline import CallPipeline
from turnstile_server.gate.session import EpisodeSession, ThreadHeaders
from turnstile_server.grading.protocol import Grader
from turnstile_server.journal.protocol import Journal
from turnstile_server.observability.metrics import Metrics
from turnstile_server.sandboxes.protocol import SandboxProvider
from turnstile_server.settings import Settings
from turnstile_server.tasks.model import Files
from turnstile_server.tools.protocol import EpisodeTools

_LOG = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class EpisodeParts:
    """What episodes are made with."""

    journal: Journal
    conductor: CallPipeline
    auditor: Auditor
    keys: EpisodeKeys
    planner: Planner
    sandboxes: SandboxProvider
    installer: Installer
    grader: Grader
    archive_of: Callable[[Files], bytes]
    agent_url: str
    settings: Settings
    metrics: Metrics


class Episodes:
    """Implements the control door's EpisodeService and the gate's EpisodeDirectory.

    Use as an async context manager: entering restores what the journal holds; leaving ends nothing, so running
    episodes are found again as ``server_restarted``.
    """

    def __init__(self, parts: EpisodeParts) -> None:
        settings = parts.settings
        self._parts = parts
        self._journal = parts.journal
        self._auditor = parts.auditor
        self._keys = parts.keys
        self._settings = settings.episodes
        self._metrics = parts.metrics
        self._director = Director(self, parts.conductor, parts.grader, settings)
        self._running: dict[str, RunningEpisode] = {}
        self._archive = Archive(parts.journal, self._settings.cached_trees)
        self._broadcast = Broadcast(self._settings.max_subscribers, self._settings.subscriber_queue)
        self._creating = anyio.Lock()
        self._exports = anyio.CapacityLimiter(self._settings.export_threads)
        self._tasks: anyio.abc.TaskGroup = anyio.create_task_group()

    async def __aenter__(self) -> Episodes:
        async for stored in restored(self._journal):
            self._archive.created(stored)
            self._archive.ended(stored.episode)
        await self._tasks.__aenter__()
        self._tasks.start_soon(self._watch)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._broadcast.close()
        for running in self._running.values():
            self._director.interrupt(running)
        self._tasks.cancel_scope.cancel()
        await self._tasks.__aexit__(None, None, None)

    # The agent's doors

    def open_episode(self, episode_id: str, key: str) -> EpisodeSession:
        return self._opened(episode_id, key).calls

    def open_tools(self, episode_id: str, key: str) -> EpisodeTools:
        return RunningTools(self._opened(episode_id, key), self._submitted)

    def _submitted(self, running: RunningEpisode) -> None:
        agent = running.plan.agent
        if agent is not None and agent.ends_on_submit:
            self._tasks.start_soon(self._director.end_unasked, running, Outcome(EpisodeStatus.COMPLETED))

    def _opened(self, episode_id: str, key: str) -> RunningEpisode:
        running = self._running.get(episode_id)
        nonce = self._keys.nonce(episode_id, key)
        if running is not None and nonce == running.stored.key_nonce:
            return running
        if nonce is not None:  # only this server makes such a key, so the episode existed
            raise Gone(f"episode {episode_id} has ended; its key is dead")
        if episode_id in self._archive:
            raise Unauthorized(f"the key does not open episode {episode_id}; each episode has a key of its own")
        raise NotFound(f"there is no episode {episode_id}")

    # The control door

    async def create(self, request: EpisodeRequest) -> tuple[EpisodeCreated, bool]:
        digest = hashlib.sha256(request.model_dump_json().encode()).hexdigest()
        async with self._creating:  # two equal creations at once must become one episode
            if request.idempotency_key is not None:
                earlier = self._archive.creation(request.idempotency_key)
                if earlier is not None:
                    if earlier.request_digest != digest:
                        raise Conflict("idempotency_key was used before, for another request")
                    episode = await self.get(earlier.episode.episode_id)
                    return self._created(replace(earlier, episode=episode)), False
            plan = self._parts.planner.plan(request)
            stored = Stored(self._admitted(request, plan), new_nonce(), request.idempotency_key, digest)
            await self._journal.append(stored.record())
            episode = stored.episode
            self._archive.created(stored)
            running = self._open(stored, plan, request.env)
        self._metrics.episode_moved(None, episode.status)
        self._broadcast.publish(episode)
        if running.stage is not None:
            self._tasks.start_soon(self._director.live, running, running.stage)
        return self._created(stored), True

    def _admitted(self, request: EpisodeRequest, plan: Plan) -> Episode:
        if len(self._running) >= self._settings.max_open:
            raise QueueFull(
                f"{len(self._running)} episodes are open, the server's limit (episodes.max_open)",
                retry_after_s=5.0,
            )
        episode = new_episode(request, plan, self._parts.settings.sampling, self._settings)
        if episode.episode_id in self._archive:
            raise Conflict(f"episode_id {episode.episode_id} is taken")
        return episode

    def _open(self, stored: Stored, plan: Plan, env: dict[str, str]) -> RunningEpisode:
        episode, parts = stored.episode, self._parts

        def exhausted(error: TurnstileError) -> None:
            self._tasks.start_soon(self._director.end_unasked, running, Outcome(EpisodeStatus.TRUNCATED, error))

        limits = call_limits(episode.limits, parts.settings.gate)
        threads = ThreadHeaders() if plan.agent is None else ThreadHeaders(**plan.agent.threads.model_dump())
        calls = EpisodeSession(episode.episode_id, episode.sampling, limits, exhausted, threads)
        stage = None
        if plan.sandbox is not None:
            key = self._keys.key(episode.episode_id, stored.key_nonce)
            made = (parts.sandboxes, parts.installer, parts.archive_of, parts.settings.agents)
            stage = Stage(episode.episode_id, key, plan, plan.sandbox, *made)
        running = self._running[episode.episode_id] = RunningEpisode(stored, calls, plan, stage, env)
        return running

    def _created(self, stored: Stored) -> EpisodeCreated:
        episode = stored.episode
        door = f"{self._parts.agent_url}/e/{episode.episode_id}"
        external = episode.agent == EXTERNAL
        return EpisodeCreated(
            episode_id=episode.episode_id,
            status=episode.status,
            model_url=door,
            tool_url=f"{door}/mcp",
            episode_key=self._keys.key(episode.episode_id, stored.key_nonce) if external else None,
        )

    async def get(self, episode_id: str, wait_s: float = 0.0) -> Episode:
        running = self._running.get(episode_id)
        if running is not None and wait_s > 0:
            await running.wait(wait_s)
            running = self._running.get(episode_id)
        if running is not None:
            return running.forest.counted(running.episode)
        episode = self._archive.get(episode_id)
        if episode is None:
            raise NotFound(f"there is no episode {episode_id}")
        return episode

    async def page(
        self, *, status: EpisodeStatus | None, group_id: str | None, cursor: str | None, limit: int
    ) -> EpisodePage:
        return self._archive.page(self._running, status=status, group_id=group_id, cursor=cursor, limit=limit)

    async def finish(self, episode_id: str) -> Episode:
        """Waits for a grading at most ``episodes.finish_wait_s``; the episode is ``grading`` then."""
        running = self._running.get(episode_id)
        if running is not None and running.plan.task.graded:
            self._tasks.start_soon(self._director.end_unasked, running, Outcome(EpisodeStatus.COMPLETED))
            with anyio.move_on_after(self._settings.finish_wait_s):
                await running.over.wait()
        elif running is not None:
            await self._director.end(running, Outcome(EpisodeStatus.COMPLETED))
        return await self.get(episode_id)

    async def cancel(self, episode_id: str) -> Episode:
        running = self._running.get(episode_id)
        if running is not None:
            await self._director.end(running, Outcome(EpisodeStatus.CANCELLED))
        return await self.get(episode_id)

    async def delete(self, episode_id: str) -> None:
        await self.cancel(episode_id)
        await self._journal.delete(episode_id)
        self._archive.forget(episode_id)

    async def turns(self, episode_id: str) -> Sequence[Turn]:
        _, forest = await self._exported(episode_id)
        return [node.turn for node in forest.tree]

    async def samples(self, episode_id: str, *, include_untrained: bool = False) -> SampleSet:
        return await self._export(export_samples, episode_id, include_untrained)

    async def tree(self, episode_id: str, *, include_untrained: bool = False) -> TokenForest:
        return await self._export(export_forest, episode_id, include_untrained)

    async def audit(self, episode_id: str) -> AuditReport:
        episode, forest = await self._exported(episode_id)
        return await self._auditor.audit(forest.tree, forest.facts(episode))

    def subscribe(self) -> AsyncIterator[Episode]:
        return self._broadcast.subscribe()

    async def _export(self, export: Callable[..., T], episode_id: str, include_untrained: bool) -> T:
        episode, forest = await self._exported(episode_id)
        facts = forest.facts(episode)
        if not episode.status.ended:
            return export(forest.tree, facts, include_untrained=include_untrained)  # the tree may change meanwhile
        return await anyio.to_thread.run_sync(
            lambda: export(forest.tree, facts, include_untrained=include_untrained), limiter=self._exports
        )

    async def _exported(self, episode_id: str) -> tuple[Episode, Forest]:
        episode = await self.get(episode_id)
        running = self._running.get(episode_id)
        if running is not None:
            return episode, running.forest
        return episode, await self._archive.forest(episode_id)

    # What the director tells (EpisodeRecords)

    def moved(self, running: RunningEpisode, status: EpisodeStatus) -> None:
        before = running.episode.status
        episode = running.status_moved(status)
        self._metrics.episode_moved(before, status)
        self._broadcast.publish(episode)

    def is_open(self, running: RunningEpisode) -> bool:
        return self._running.get(running.episode.episode_id) is running

    async def ended(self, running: RunningEpisode, outcome: Outcome) -> None:
        forest, before = running.forest, running.episode
        stored = replace(running.stored, episode=forest.counted(outcome.on(before, running.elapsed())))
        await self._journal.append(stored.record())
        del self._running[before.episode_id]
        self._archive.ended(stored.episode, forest)
        running.moved(stored)
        self._count_ended(before.status, stored.episode)
        self._broadcast.publish(stored.episode)

    def _count_ended(self, before: EpisodeStatus, episode: Episode) -> None:
        stats = episode.stats
        self._metrics.episode_moved(before, episode.status)
        self._metrics.tokens_trained(stats.trained_tokens)
        for reason, tokens in stats.untrained.items():
            self._metrics.tokens_untrained(reason, tokens)
        if stats.trained_share < self._settings.trained_share_alert:
            self._metrics.low_trained_share()
            _LOG.warning(
                "episode %s trains only %.0f %% of its sampled tokens: untrained %s",
                episode.episode_id,
                100 * stats.trained_share,
                stats.untrained,
            )

    async def _watch(self) -> None:
        """Ends what is over its wall or idle limit, and applies the journal's retention."""
        next_retention = time.monotonic()
        while True:
            for running in list(self._running.values()):
                due = running.due_end()
                if due is not None and not running.ending.statistics().locked:
                    self._tasks.start_soon(self._director.end_unasked, running, due)
            if time.monotonic() >= next_retention:
                await self._apply_retention()
                next_retention = time.monotonic() + self._settings.retention_interval_s
            await anyio.sleep(self._settings.watch_interval_s)

    async def _apply_retention(self) -> None:
        try:
            deleted = await self._journal.apply_retention(time.time())
        except TurnstileError as error:
            _LOG.error("retention could not be applied: %s", error.message)
            return
        for episode_id in deleted:
            self._archive.forget(episode_id)
