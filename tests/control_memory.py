"""Episodes and an engine in memory, with the behaviour that the control door's seams demand."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

import anyio

from turnstile.models import (
    AuditReport,
    Episode,
    EpisodeCreated,
    EpisodePage,
    EpisodeRequest,
    EpisodeStats,
    EpisodeStatus,
    EpisodeTimings,
    Message,
    Sample,
    SampleSet,
    Sampling,
    SamplingUsed,
    Turn,
    TurnAudit,
    TurnTimings,
    WeightSpan,
    new_id,
)
from turnstile_server.engines.protocol import EngineCapabilities, EngineState
from turnstile_server.errors import (
    Conflict,
    EngineRefused,
    EngineUnavailable,
    InvalidRequest,
    NotFound,
    TooManyCalls,
    Unprocessable,
)

MAX_TURNS = 1000


class MemoryEpisodes:
    def __init__(self, max_open: int) -> None:
        self._max_open = max_open
        self._episodes: dict[str, Episode] = {}
        self._turns: dict[str, list[Turn]] = {}
        self._keys: dict[str, tuple[EpisodeRequest, EpisodeCreated]] = {}
        self.readers: list[Any] = []
        self._changed = anyio.Event()
        self.fail_with: Exception | None = None
        self.waiting = 0

    async def create(self, request: EpisodeRequest) -> tuple[EpisodeCreated, bool]:
        if self.fail_with is not None:
            raise self.fail_with
        key = request.idempotency_key
        if key is not None and key in self._keys:
            before, created = self._keys[key]
            if before != request:
                raise Conflict("This idempotency key was used with another body.")
            return created, False
        if (request.limits.max_turns or 0) > MAX_TURNS:
            raise Unprocessable(f"limits.max_turns: the ceiling is {MAX_TURNS} (episodes.max_turns)")
        episode_id = request.episode_id or new_id("ep")
        if episode_id in self._episodes:
            raise Conflict(f"{episode_id} exists.")
        if sum(not e.status.ended for e in self._episodes.values()) >= self._max_open:
            raise TooManyCalls("Too many open episodes.", retry_after_s=0.2)
        self._put(
            Episode(
                episode_id=episode_id,
                status=EpisodeStatus.RUNNING,
                agent=request.agent,
                task=request.task,
                group_id=request.group_id,
                rollout_id=request.rollout_id or episode_id,
                attempt=request.attempt,
                sampling=request.sampling or Sampling(),
                limits=request.limits,
                metadata=request.metadata,
                timings=EpisodeTimings(created_at=time.time()),
            )
        )
        self._turns[episode_id] = []
        created = EpisodeCreated(
            episode_id=episode_id,
            status=EpisodeStatus.RUNNING,
            model_url=f"http://127.0.0.1:8001/e/{episode_id}",
            episode_key="key",
        )
        if key is not None:
            self._keys[key] = (request, created)
        return created, True

    async def get(self, episode_id: str, wait_s: float = 0.0) -> Episode:
        first = self._known(episode_id)
        self.waiting += 1
        try:
            with anyio.move_on_after(wait_s):
                while not (now := self._known(episode_id)).status.ended and now.status == first.status:
                    await self._changed.wait()
        finally:
            self.waiting -= 1
        return self._known(episode_id)

    async def page(
        self, *, status: EpisodeStatus | None, group_id: str | None, cursor: str | None, limit: int
    ) -> EpisodePage:
        if cursor is not None and cursor not in self._episodes:
            raise InvalidRequest("unknown cursor")
        found = [
            e
            for e in reversed(self._episodes.values())
            if (status is None or e.status == status) and (group_id is None or e.group_id == group_id)
        ]
        if cursor is not None:
            found = found[[e.episode_id for e in found].index(cursor) + 1 :]
        more = len(found) > limit
        return EpisodePage(episodes=tuple(found[:limit]), cursor=found[limit - 1].episode_id if more else None)

    async def finish(self, episode_id: str) -> Episode:
        return self._end(episode_id, EpisodeStatus.COMPLETED)

    async def cancel(self, episode_id: str) -> Episode:
        return self._end(episode_id, EpisodeStatus.CANCELLED)

    async def delete(self, episode_id: str) -> None:
        self._known(episode_id)
        del self._episodes[episode_id]

    async def turns(self, episode_id: str) -> Sequence[Turn]:
        self._known(episode_id)
        return self._turns[episode_id]

    async def samples(self, episode_id: str, *, include_untrained: bool = False) -> SampleSet:
        self._known(episode_id)
        rows = [
            Sample(
                sample_id=turn.turn_id.replace("turn", "sample"),
                input_ids=[*turn.context_ids, *turn.completion_ids],
                loss_mask=[0] * len(turn.context_ids) + [1] * len(turn.completion_ids),
                logprobs=[0.0] * len(turn.context_ids) + turn.logprobs.tolist(),
                weight_version=[-1] * len(turn.context_ids) + [0] * len(turn.completion_ids),
                weight_version_names=("v1",),
                turn_spans=(),
                kind="main",
                episode_id=episode_id,
                rollout_id=episode_id,
                finish_reason="stop",
                status="completed",
            )
            for turn in self._turns[episode_id]
        ]
        if include_untrained:
            rows += [row.model_copy(update={"loss_mask": row.loss_mask * 0, "kind": "retry"}) for row in rows]
        return SampleSet(samples=tuple(rows), untrained=(), stats=EpisodeStats())

    async def audit(self, episode_id: str) -> AuditReport:
        turns = tuple(
            TurnAudit(turn_id=t.turn_id, tokens=3, max_abs_delta=1e-6) for t in await self.turns(episode_id)
        )
        return AuditReport(
            episode_id=episode_id, turns=turns, invariants=(), max_abs_delta=1e-6, tolerance=1e-4, passed=True
        )

    async def subscribe(self) -> AsyncIterator[Episode]:
        into, events = anyio.create_memory_object_stream[Episode](16)
        self.readers.append(into)
        try:
            async for episode in events:
                yield episode
        finally:
            self.readers.remove(into)
            into.close()

    def add_turn(self, episode_id: str) -> str:
        turns = self._turns[episode_id]
        turn = Turn(
            turn_id=new_id("turn"),
            episode_id=episode_id,
            parent_id=None,
            seq=len(turns),
            dialect="chat",
            context_ids=[1, 2],
            completion_ids=[3, 4, 5],
            logprobs=[-0.1, -0.2, -0.3],
            weight_spans=(WeightSpan(start=0, end=3, version="v1"),),
            finish_reason="stop",
            sampling=SamplingUsed(max_new_tokens=8),
            template_hash="t",
            tools_key="k",
            request_key="r",
            new_messages=(Message("user", "hello"),),
            reply=Message("assistant", "hi"),
            timings=TurnTimings(started_at=0.0),
        )
        turns.append(turn)
        return turn.turn_id

    def _known(self, episode_id: str) -> Episode:
        if episode_id not in self._episodes:
            raise NotFound(f"There is no episode {episode_id}.")
        return self._episodes[episode_id]

    def _end(self, episode_id: str, status: EpisodeStatus) -> Episode:
        episode = self._known(episode_id)
        if not episode.status.ended:
            self._put(episode.model_copy(update={"status": status}))
        return self._known(episode_id)

    def _put(self, episode: Episode) -> None:
        self._episodes[episode.episode_id] = episode
        self._changed.set()
        self._changed = anyio.Event()
        for reader in self.readers:
            reader.send_nowait(episode)


class MemoryEngine:
    def __init__(self) -> None:
        self.capabilities = EngineCapabilities(context_length=64, vocab_size=32, model_name="memory")
        self._state = EngineState(ok=True, weight_version="v1", paused=False)
        self.down = False

    async def state(self) -> EngineState:
        return self._state

    async def pause(self, mode: str) -> None:
        if self.down:
            raise EngineUnavailable("The engine does not answer.", retry_after_s=1.2)
        self._state = EngineState(ok=True, weight_version=self._state.weight_version, paused=True, detail=mode)

    async def resume(self) -> None:
        self._state = EngineState(ok=True, weight_version=self._state.weight_version, paused=False)

    async def update_weights(self, path: str, version: str) -> None:
        if path == "/nowhere":
            raise EngineRefused("No weights in /nowhere.")
        self._state = EngineState(ok=True, weight_version=version, paused=self._state.paused)
