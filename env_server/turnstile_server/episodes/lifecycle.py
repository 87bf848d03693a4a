"""The decisions in the life of an episode: a pure state machine, without a task, a clock of its own or I/O.

Times are monotonic seconds, pushed in by the caller. What must hold:

1. The status moves only along ``TRANSITIONS``, so an ended episode never changes.
2. The first stop request decides how the episode ends. There is one exception: a cancellation also replaces an
   earlier outcome whose work is still to be graded, because a cancelled episode has no reward.
3. Work is graded at most once, and only after an outcome in ``GRADED``; a grade that was given is final.
4. When the server shuts down, no further stop counts: an episode is stored as it was decided before, or not at
   all.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from turnstile.models import Episode, EpisodeStatus
from turnstile_server.episodes.outcome import Outcome
from turnstile_server.errors import EpisodeOverdue

ENDED = frozenset(status for status in EpisodeStatus if status.ended)

TRANSITIONS: Mapping[EpisodeStatus, frozenset[EpisodeStatus]] = {
    EpisodeStatus.QUEUED: ENDED | {EpisodeStatus.PREPARING, EpisodeStatus.GRADING},
    EpisodeStatus.PREPARING: ENDED | {EpisodeStatus.RUNNING, EpisodeStatus.GRADING},
    EpisodeStatus.RUNNING: ENDED | {EpisodeStatus.GRADING},
    EpisodeStatus.GRADING: ENDED,
    **dict.fromkeys(ENDED, frozenset[EpisodeStatus]()),
}
"""Allowed changes of status. An external agent may be finished, and graded, before its sandbox is there."""

GRADED = frozenset({EpisodeStatus.COMPLETED, EpisodeStatus.TRUNCATED, EpisodeStatus.TIMED_OUT})
"""Outcomes whose work is graded: the agent worked to its end, or to the end of a budget. The work of a failed
agent is not graded: a reward for it would say something about a crash."""

DRAINED = frozenset({EpisodeStatus.COMPLETED, EpisodeStatus.TRUNCATED})
"""Outcomes that let model calls in flight end by themselves. The others abort them at once."""

_WALL_LIMITED = frozenset({EpisodeStatus.PREPARING, EpisodeStatus.RUNNING})
"""``limits.wall_s`` counts neither the queue nor the grading."""


class Lifecycle:
    """State of one episode. ``graded``: its task says how to grade the work."""

    def __init__(self, episode: Episode, *, graded: bool, now: float) -> None:
        self.episode = episode
        """The record as it is now; its statistics are not kept here."""
        self.stop: Outcome | None = None
        """The requested end of the episode; None while no stop was requested."""
        self.shutting_down = False
        """The server stops: no stop request counts any more, and no grading is to begin."""
        self._to_grade = graded
        self._created = self._started = self._moved = now
        self._still_since: float | None = None

    def move(self, status: EpisodeStatus, now: float) -> None:
        """A step before the end, with its time in ``timings``. Raises ValueError outside ``TRANSITIONS``."""
        self._check(status)
        timings = self.episode.timings.model_copy(update={f"{status.value}_s": now - self._created})
        self.episode = self.episode.model_copy(update={"status": status, "timings": timings})
        self._moved = now
        if status is EpisodeStatus.PREPARING:
            self._started = now

    def instruct(self, instruction: str) -> None:
        """Records the instruction that the episode's environment made."""
        self.episode = self.episode.model_copy(update={"instruction": instruction})

    def note_killed(self, output: str | None) -> None:
        """Records the last output of an agent that was killed; None: it ended by itself."""
        self.episode = self.episode.model_copy(update={"agent_output": output})

    def reward(self, rewarded: Episode) -> None:
        """Takes over the rewards of a record that was stored; nothing else of it, which may be old by now."""
        fields = {"turn_rewards": rewarded.turn_rewards, "late_rewards": rewarded.late_rewards}
        self.episode = self.episode.model_copy(update=fields)

    def restart(self, now: float) -> None:
        """``limits.wall_s`` counts from here."""
        self._started = self._moved = now

    def go_on_after(self, spent_s: float, now: float) -> None:
        """The server was restarted: ``limits.wall_s`` counts the seconds before that, and again from now."""
        self._started, self._moved = now - max(0.0, spent_s), now

    def stand_still(self, now: float) -> None:
        """From now on no time counts: what goes on is not the agent's doing."""
        self._still_since = now

    def go_on(self, now: float) -> None:
        """The end of ``stand_still``: the time since then counts to no limit."""
        if self._still_since is not None:
            self._started += now - self._still_since
            self._moved, self._still_since = now, None

    def request_stop(self, outcome: Outcome) -> bool:
        """Decides whether ``outcome`` is how the episode ends. False: an earlier request stands, or the server
        stops."""
        if self.shutting_down:
            return False
        if self.stop is None:
            self.stop = outcome
            return True
        if outcome.status is EpisodeStatus.CANCELLED and self.needs_grade:
            self.stop = replace(outcome, agent=self.stop.agent)
            return True
        return False

    def shut_down(self) -> None:
        self.shutting_down = True

    @property
    def needs_grade(self) -> bool:
        """The episode stops with an outcome whose work is graded, and has not been yet."""
        return self._to_grade and self.stop is not None and self.stop.status in GRADED

    @property
    def decided(self) -> bool:
        """The outcome is final, and can be stored."""
        return self.stop is not None and not self.needs_grade

    def settle(self, outcome: Outcome) -> None:
        """Makes ``outcome`` final: the stop with its grade, or with why there is none; or a fault of the
        server."""
        self.stop = outcome
        self._to_grade = False

    def final_record(self, now: float) -> Episode:
        """The record to store. Changes nothing, because the journal may refuse it."""
        assert self.stop is not None
        return self.stop.applied_to(self.episode, now - self._created)

    def end(self, ended: Episode) -> None:
        """Takes the record that was stored. Raises ValueError outside ``TRANSITIONS``."""
        self._check(ended.status)
        self.episode = ended

    def _check(self, status: EpisodeStatus) -> None:
        if status not in TRANSITIONS[self.episode.status]:
            raise ValueError(f"an episode cannot move from {self.episode.status.value} to {status.value}")

    def overdue(self, now: float, *, calls_in_flight: bool, last_activity: float) -> EpisodeOverdue | None:
        """The error of an overdue episode; None while it is not overdue. ``last_activity``: of its model calls."""
        limits, status = self.episode.limits, self.episode.status
        if self.stop is not None or self._still_since is not None:
            return None
        if status in _WALL_LIMITED and limits.wall_s is not None and now - self._started > limits.wall_s:
            return EpisodeOverdue(f"the episode ran longer than limits.wall_s = {limits.wall_s:g} s")
        if status is not EpisodeStatus.RUNNING or limits.idle_s is None or calls_in_flight:
            return None
        if now - max(last_activity, self._moved) > limits.idle_s:
            return EpisodeOverdue(f"no model call was in flight for limits.idle_s = {limits.idle_s:g} s")
        return None
