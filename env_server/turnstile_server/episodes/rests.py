"""Snapshots for forks, and states of the work folder for replay: taken of an episode's sandbox while its agent is
at rest. No failure of these fails the episode."""

from __future__ import annotations

import anyio

from turnstile.models import ReplayMoment, SpanKind
from turnstile_server.episodes.plan import Plan
from turnstile_server.episodes.sandbox import EpisodeSandbox
from turnstile_server.episodes.snapshots import Snapshots
from turnstile_server.replay.recorder import EpisodeReplay
from turnstile_server.spans import SpanRecorder


class EpisodeRests:
    """``replay`` None: no states are recorded."""

    def __init__(
        self,
        episode_id: str,
        plan: Plan,
        sandbox: EpisodeSandbox | None,
        snapshots: Snapshots,
        replay: EpisodeReplay | None,
        spans: SpanRecorder,
    ) -> None:
        self._episode_id = episode_id
        self._plan = plan
        self._sandbox = sandbox
        self._snapshots = snapshots
        self._replay = replay
        self._spans = spans
        self._stopped = anyio.CancelScope()

    @property
    def wanted(self) -> bool:
        """Something is kept between turns."""
        return self._plan.keeps_turns or self._replay is not None

    async def after_turn(self, turn_id: str) -> None:
        """The turn's tool calls have run, and the agent waits for the next model call."""
        sandbox = None if self._sandbox is None else self._sandbox.at_work
        if sandbox is not None and self._plan.keeps_turns:
            with self._spans.span(SpanKind.SNAPSHOT, "after turn", turn_id=turn_id) as span:
                taken = self._snapshots.after_turn(self._episode_id, sandbox, turn_id, self._plan.settle_s)
                span.error = None if await taken else "missed"
        await self._record("turn", turn_id)

    async def begin(self) -> None:
        """An agent is about to begin."""
        await self._record("begin", None)

    async def end(self, turn_id: str | None) -> None:
        """The agent has ended, and its work is not collected yet. ``turn_id``: of the latest turn."""
        with self._stopped:
            await self._record("end", turn_id)

    def give_up(self) -> None:
        """The server stops: ``end`` returns at once."""
        self._stopped.cancel()

    async def _record(self, moment: ReplayMoment, turn_id: str | None) -> None:
        sandbox = None if self._sandbox is None else self._sandbox.at_work
        if sandbox is not None and self._replay is not None:
            with self._spans.span(SpanKind.SNAPSHOT, "replay", turn_id=turn_id, moment=moment) as span:
                taken = await self._replay.record(sandbox, moment, turn_id, self._spans.now())
                span.error = None if taken else "missed"
