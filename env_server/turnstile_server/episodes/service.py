"""The life of episodes: created, run, ended once, exported, deleted.

Owns every running episode. Holds: an episode ends exactly once; its end is durable before anyone is told; a key
opens only its own, running episode; nothing is ended by being asked about.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace

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
    ErrorInfo,
    SampleSet,
    Sampling,
    Turn,
)
from turnstile_server.capture import export_samples
from turnstile_server.episodes.admission import new_episode
from turnstile_server.episodes.archive import Archive
from turnstile_server.episodes.auditor import Auditor
from turnstile_server.episodes.broadcast import Broadcast
from turnstile_server.episodes.keys import EpisodeKeys, new_nonce
from turnstile_server.episodes.limits import call_limits
from turnstile_server.episodes.restore import restored
from turnstile_server.episodes.running import RunningEpisode
from turnstile_server.episodes.store import Forest, Stored
from turnstile_server.errors import (
    Conflict,
    Gone,
    NotFound,
    QueueFull,
    TurnstileError,
    Unauthorized,
)
from turnstile_server.gate.episode_calls import EpisodeCalls
from turnstile_server.gate.turn import Conductor
from turnstile_server.journal.protocol import Journal
from turnstile_server.observability.metrics import Metrics
from turnstile_server.settings import EpisodeSettings, GateSettings

_LOG = logging.getLogger(__name__)


class Episodes:
    """Implements the control door's EpisodeService and the gate's EpisodeDirectory.

    Use as an async context manager: entering restores what the journal holds; leaving ends nothing, so running
    episodes are found again as ``server_restarted``.
    """

    def __init__(
        self,
        journal: Journal,
        conductor: Conductor,
        auditor: Auditor,
        keys: EpisodeKeys,
        model_url: str,
        sampling: Sampling,
        settings: EpisodeSettings,
        gate: GateSettings,
        metrics: Metrics,
    ) -> None:
        self._journal = journal
        self._conductor = conductor
        self._auditor = auditor
        self._keys = keys
        self._model_url = model_url
        self._sampling = sampling
        self._settings = settings
        self._gate = gate
        self._metrics = metrics
        self._running: dict[str, RunningEpisode] = {}
        self._archive = Archive(journal, settings.cached_trees)
        self._broadcast = Broadcast(settings.max_subscribers, settings.subscriber_queue)
        self._creating = anyio.Lock()
        self._exports = anyio.CapacityLimiter(settings.export_threads)
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
        self._tasks.cancel_scope.cancel()
        await self._tasks.__aexit__(None, None, None)

    # The gate

    def open_episode(self, episode_id: str, key: str) -> EpisodeCalls:
        running = self._running.get(episode_id)
        nonce = self._keys.nonce(episode_id, key)
        if running is not None and nonce == running.stored.key_nonce:
            return running.calls
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
            stored = Stored(self._admitted(request), new_nonce(), request.idempotency_key, digest)
            await self._journal.append(stored.record())
            episode = stored.episode
            self._archive.created(stored)
            self._running[episode.episode_id] = RunningEpisode(stored, self._calls(episode))
        self._metrics.episode_moved(None, episode.status)
        self._broadcast.publish(episode)
        return self._created(stored), True

    def _admitted(self, request: EpisodeRequest) -> Episode:
        if len(self._running) >= self._settings.max_open:
            raise QueueFull(
                f"{len(self._running)} episodes are open, the server's limit (episodes.max_open)",
                retry_after_s=5.0,
            )
        episode = new_episode(request, self._sampling, self._settings)
        if episode.episode_id in self._archive:
            raise Conflict(f"episode_id {episode.episode_id} is taken")
        return episode

    def _calls(self, episode: Episode) -> EpisodeCalls:
        def exhausted(error: TurnstileError) -> None:
            self._tasks.start_soon(self._end_unasked, episode.episode_id, EpisodeStatus.TRUNCATED, error)

        limits = call_limits(episode.limits, self._gate)
        return EpisodeCalls(episode.episode_id, episode.sampling, limits, exhausted)

    def _created(self, stored: Stored) -> EpisodeCreated:
        episode = stored.episode
        return EpisodeCreated(
            episode_id=episode.episode_id,
            status=episode.status,
            model_url=f"{self._model_url}/e/{episode.episode_id}",
            episode_key=self._keys.key(episode.episode_id, stored.key_nonce),
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
        await self._end(episode_id, EpisodeStatus.COMPLETED, None)
        return await self.get(episode_id)

    async def cancel(self, episode_id: str) -> Episode:
        await self._end(episode_id, EpisodeStatus.CANCELLED, None)
        return await self.get(episode_id)

    async def delete(self, episode_id: str) -> None:
        await self._end(episode_id, EpisodeStatus.CANCELLED, None)
        await self.get(episode_id)
        await self._journal.delete(episode_id)
        self._archive.forget(episode_id)

    async def turns(self, episode_id: str) -> Sequence[Turn]:
        _, forest = await self._exported(episode_id)
        return [node.turn for node in forest.tree]

    async def samples(self, episode_id: str, *, include_untrained: bool = False) -> SampleSet:
        episode, forest = await self._exported(episode_id)
        facts = forest.facts(episode)
        if not episode.status.ended:
            return export_samples(forest.tree, facts, include_untrained=include_untrained)
        return await anyio.to_thread.run_sync(
            lambda: export_samples(forest.tree, facts, include_untrained=include_untrained), limiter=self._exports
        )

    async def audit(self, episode_id: str) -> AuditReport:
        episode, forest = await self._exported(episode_id)
        return await self._auditor.audit(forest.tree, forest.facts(episode))

    def subscribe(self) -> AsyncIterator[Episode]:
        return self._broadcast.subscribe()

    async def _exported(self, episode_id: str) -> tuple[Episode, Forest]:
        episode = await self.get(episode_id)
        running = self._running.get(episode_id)
        if running is not None:
            return episode, running.forest
        return episode, await self._archive.forest(episode_id)

    # Ending

    async def _end(self, episode_id: str, status: EpisodeStatus, error: TurnstileError | None) -> None:
        """Ends the episode once; whoever comes later finds it ended. A caller that goes away does not stop it."""
        running = self._running.get(episode_id)
        if running is None:
            return
        with anyio.CancelScope(shield=True):
            async with running.ending:
                if episode_id in self._running:
                    await self._end_now(running, status, error)

    async def _end_unasked(self, episode_id: str, status: EpisodeStatus, error: TurnstileError) -> None:
        """An end that no request waits for. If it cannot be stored, the episode stays, closed, and the watch
        tries again, unless the trainer ends it before."""
        running = self._running.get(episode_id)
        try:
            await self._end(episode_id, status, error)
        except TurnstileError as failure:
            _LOG.error("episode %s could not be ended: %s", episode_id, failure.message)
            if running is not None:
                running.owed_end = (status, error)

    async def _end_now(self, running: RunningEpisode, status: EpisodeStatus, error: TurnstileError | None) -> None:
        episode_id = running.episode.episode_id
        running.calls.closed = Gone(f"episode {episode_id} has ended ({status.value}); its key is dead")
        drain_s = 0.0 if status in (EpisodeStatus.CANCELLED, EpisodeStatus.TIMED_OUT) else self._gate.drain_s
        await self._drain(running.calls, drain_s, status)
        forest = running.forest
        ended = running.episode.model_copy(
            update={
                "status": status,
                "error": ErrorInfo(type=error.type, message=error.message) if error is not None else None,
                "timings": running.episode.timings.model_copy(update={"ended_s": running.elapsed()}),
            }
        )
        stored = replace(running.stored, episode=forest.counted(ended))
        await self._journal.append(stored.record())
        del self._running[episode_id]
        self._archive.ended(stored.episode, forest)
        running.moved(stored)
        self._count_ended(stored.episode)
        self._broadcast.publish(stored.episode)

    async def _drain(self, calls: EpisodeCalls, drain_s: float, status: EpisodeStatus) -> None:
        """Lets calls in flight end by themselves, then has the conductor give them up."""
        with anyio.move_on_after(drain_s):
            for call in list(calls.in_flight.values()):
                await call.ended()
        left = list(calls.in_flight.values())
        for call in left:
            self._conductor.abandon(call, status.value)
        for call in left:
            await call.ended()

    def _count_ended(self, episode: Episode) -> None:
        stats = episode.stats
        self._metrics.episode_moved(EpisodeStatus.RUNNING, episode.status)
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
            for episode_id, running in list(self._running.items()):
                due = running.due_end()
                if due is not None and not running.ending.statistics().locked:
                    self._tasks.start_soon(self._end_unasked, episode_id, *due)
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
