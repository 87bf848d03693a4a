"""A running episode: its record, its calls, and the wait for its next change of status."""

from __future__ import annotations

import time

import anyio

from turnstile.models import Episode, EpisodeStatus
from turnstile_server.episodes.store import Forest, Stored
from turnstile_server.errors import EpisodeOverdue, TurnstileError
from turnstile_server.gate.episode_calls import EpisodeCalls


class RunningEpisode:
    """Changes only through ``moved``; the lock makes one ending of many requests to end it."""

    def __init__(self, stored: Stored, calls: EpisodeCalls) -> None:
        self.stored = stored
        self.calls = calls
        self.ending = anyio.Lock()
        self.owed_end: tuple[EpisodeStatus, TurnstileError] | None = None
        """An end that was decided but could not be stored yet."""
        self._started = time.monotonic()
        self._changed = anyio.Event()
        calls.last_activity = self._started

    @property
    def episode(self) -> Episode:
        return self.stored.episode

    @property
    def forest(self) -> Forest:
        return Forest(self.calls.tree, self.calls.discarded)

    def elapsed(self) -> float:
        """Seconds since creation, monotonic."""
        return time.monotonic() - self._started

    def moved(self, stored: Stored) -> None:
        """A new record of the episode; wakes everyone who waits for a change."""
        self.stored = stored
        changed, self._changed = self._changed, anyio.Event()
        changed.set()

    async def wait(self, seconds: float) -> None:
        """Returns at the next change of status, or after ``seconds``."""
        with anyio.move_on_after(seconds):
            await self._changed.wait()

    def due_end(self) -> tuple[EpisodeStatus, TurnstileError] | None:
        """How the episode is to be ended now, None while it may run."""
        if self.owed_end is not None:
            return self.owed_end
        error = self.overdue()
        return (EpisodeStatus.TIMED_OUT, error) if error is not None else None

    def overdue(self) -> TurnstileError | None:
        """Why the episode's time is over, None while it is not."""
        limits, calls = self.episode.limits, self.calls
        if limits.wall_s is not None and self.elapsed() > limits.wall_s:
            return EpisodeOverdue(f"the episode ran longer than limits.wall_s = {limits.wall_s:g} s")
        idle = 0.0 if calls.in_flight else time.monotonic() - calls.last_activity
        if limits.idle_s is not None and idle > limits.idle_s:
            return EpisodeOverdue(f"no model call was in flight for limits.idle_s = {limits.idle_s:g} s")
        return None
