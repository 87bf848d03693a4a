"""A running episode: its record, its calls, its stage, and the wait for its next change of status."""

from __future__ import annotations

import time
from dataclasses import replace

import anyio

from turnstile.models import Episode, EpisodeStatus
from turnstile_server.episodes.outcome import Outcome
from turnstile_server.episodes.plan import Plan
from turnstile_server.episodes.stage import Stage
from turnstile_server.episodes.store import Forest, Stored
from turnstile_server.errors import EpisodeOverdue
from turnstile_server.gate.session import EpisodeSession

_LIMITED = frozenset({EpisodeStatus.PREPARING, EpisodeStatus.RUNNING})


class RunningEpisode:
    """Its record changes only through ``moved``; the lock makes one ending of many requests to end it."""

    def __init__(
        self, stored: Stored, calls: EpisodeSession, plan: Plan, stage: Stage | None, env: dict[str, str]
    ) -> None:
        self.stored = stored
        self.calls = calls
        self.plan = plan
        self.stage = stage
        self.env = env
        """What the trainer adds to the agent's environment; in no record, for it may hold secrets."""
        self.answer: str | None = None
        """What was last submitted."""
        self.ending = anyio.Lock()
        self.unstored_outcome: Outcome | None = None
        """An end that was decided but could not be stored yet."""
        self.active = anyio.CancelScope()
        """Around the part of the stage's life that an end from elsewhere cuts short: queue, set-up, agent."""
        self.active_over = anyio.Event()
        self.grading: anyio.CancelScope | None = None
        """Around the grading, while it runs."""
        self.cancelled = False
        """A cancellation was asked for, perhaps while another end was under way."""
        self.closed = anyio.Event()
        """Its end has begun: neither door takes a call any more."""
        self.over = anyio.Event()
        """The end is stored."""
        self._created = self._began = time.monotonic()
        self._changed = anyio.Event()
        calls.last_activity = self._created

    @property
    def episode(self) -> Episode:
        return self.stored.episode

    @property
    def forest(self) -> Forest:
        return Forest(self.calls.tree, self.calls.discarded)

    def elapsed(self) -> float:
        """Seconds since creation, monotonic."""
        return time.monotonic() - self._created

    def began(self) -> None:
        """It left the queue: limits of time count from here."""
        self._began = self.calls.last_activity = time.monotonic()

    def status_moved(self, status: EpisodeStatus) -> Episode:
        """A step of its life before the end, with the time it was taken."""
        now = self.elapsed()
        timings = self.episode.timings.model_copy(update={f"{status.value}_s": now})
        episode = self.episode.model_copy(update={"status": status, "timings": timings})
        if status is EpisodeStatus.RUNNING:
            self.calls.last_activity = time.monotonic()
        self.moved(replace(self.stored, episode=episode))
        return episode

    def moved(self, stored: Stored) -> None:
        """A new record of the episode; wakes everyone who waits for a change."""
        self.stored = stored
        changed, self._changed = self._changed, anyio.Event()
        changed.set()

    async def wait(self, seconds: float) -> None:
        """Returns at the next change of status, or after ``seconds``."""
        with anyio.move_on_after(seconds):
            await self._changed.wait()

    def due_end(self) -> Outcome | None:
        """How the episode is to be ended now, None while it may run."""
        if self.unstored_outcome is not None:
            return self.unstored_outcome
        error = self.overdue()
        return Outcome(EpisodeStatus.TIMED_OUT, error) if error is not None else None

    def overdue(self) -> EpisodeOverdue | None:
        """Why the episode's time is over, None while it is not. Neither the queue nor the grading counts."""
        limits, calls, now = self.episode.limits, self.calls, time.monotonic()
        if self.episode.status not in _LIMITED:
            return None
        if limits.wall_s is not None and now - self._began > limits.wall_s:
            return EpisodeOverdue(f"the episode ran longer than limits.wall_s = {limits.wall_s:g} s")
        idle = 0.0 if calls.in_flight else now - calls.last_activity
        running = self.episode.status is EpisodeStatus.RUNNING
        if running and limits.idle_s is not None and idle > limits.idle_s:
            return EpisodeOverdue(f"no model call was in flight for limits.idle_s = {limits.idle_s:g} s")
        return None
