"""The decisions in the life of an episode, one rule a test: no server, no task, no clock."""

from __future__ import annotations

from itertools import product

import pytest

from turnstile.models import EndedBy, Episode, EpisodeStatus, EpisodeTimings, Limits, Sampling, TaskRef
from turnstile_server.episodes.lifecycle import ENDED, GRADED, TRANSITIONS, Lifecycle
from turnstile_server.episodes.outcome import AgentEnd, Outcome
from turnstile_server.errors import BudgetExhausted, LeaseLapsed, SandboxFailed
from turnstile_server.grading.protocol import Grade

S = EpisodeStatus
OUTCOMES = {
    S.COMPLETED: Outcome(S.COMPLETED, None, AgentEnd(0, "bye")),
    S.TRUNCATED: Outcome(S.TRUNCATED, BudgetExhausted("spent")),
    S.TIMED_OUT: Outcome(S.TIMED_OUT),
    S.FAILED: Outcome(S.FAILED, SandboxFailed("gone")),
    S.CANCELLED: Outcome(S.CANCELLED),
}


def lifecycle(
    status: EpisodeStatus = S.RUNNING,
    *,
    graded: bool = True,
    wall_s: float | None = None,
    idle_s: float | None = None,
) -> Lifecycle:
    """An episode that was created at second 100, and taken to ``status`` one second a step."""
    first = S.RUNNING if status is S.RUNNING else S.QUEUED
    episode = Episode(
        episode_id="e",
        status=first,
        agent="external",
        task=TaskRef(id="t"),
        rollout_id="e",
        sampling=Sampling(),
        limits=Limits(wall_s=wall_s, idle_s=idle_s),
        timings=EpisodeTimings(created_at=0.0),
    )
    made = Lifecycle(episode, graded=graded, now=100.0)
    steps = (S.QUEUED, S.PREPARING, S.RUNNING, S.GRADING)
    for second, step in enumerate(steps[1 : steps.index(status) + 1] if first is S.QUEUED else (), 101):
        made.move(step, float(second))
    return made


# Transitions


def test_a_status_moves_only_along_the_transitions() -> None:
    for before, after in product(sorted(TRANSITIONS), EpisodeStatus):
        life = lifecycle(before if before not in ENDED else S.GRADING)
        if before in ENDED:
            life.request_stop(OUTCOMES[before])
            life.end(life.final_record(150.0))
        if after in TRANSITIONS[before]:
            life.move(after, 200.0)
            assert life.episode.status is after
        else:
            with pytest.raises(ValueError, match=f"from {before.value} to {after.value}"):
                life.move(after, 200.0)
            assert life.episode.status is before


def test_every_status_but_the_ends_can_end_in_every_way_and_no_end_moves() -> None:
    for status, following in TRANSITIONS.items():
        assert following >= ENDED if status not in ENDED else not following
    assert set(TRANSITIONS) == set(EpisodeStatus)


def test_each_step_has_its_seconds_from_the_creation() -> None:
    life = lifecycle(S.GRADING)
    life.request_stop(OUTCOMES[S.COMPLETED])
    timings = life.final_record(110.0).timings
    assert (timings.preparing_s, timings.running_s, timings.grading_s, timings.ended_s) == (1.0, 2.0, 3.0, 10.0)


# Which stop request decides


def test_without_a_grading_the_first_request_decides() -> None:
    for first, second in product(OUTCOMES, OUTCOMES):
        life = lifecycle(graded=False)
        assert life.request_stop(OUTCOMES[first]), first
        assert life.decided, first
        assert not life.request_stop(OUTCOMES[second]), (first, second)
        assert life.stop is OUTCOMES[first], (first, second)


def test_with_a_grading_the_first_decides_but_for_a_cancellation() -> None:
    for first, second in product(OUTCOMES, OUTCOMES):
        life = lifecycle()
        life.request_stop(OUTCOMES[first])
        replaced = second is S.CANCELLED and first in GRADED
        assert life.needs_grade == (first in GRADED), first
        assert life.request_stop(OUTCOMES[second]) == replaced, (first, second)
        assert life.stop is not None
        assert life.stop.status is (S.CANCELLED if replaced else first), (first, second)
        assert life.stop.agent is OUTCOMES[first].agent, "what the agent printed is kept"
        assert life.decided == (first not in GRADED or replaced), (first, second)


def test_a_cancellation_that_replaces_an_outcome_keeps_its_own_reason() -> None:
    for outcome in (Outcome(S.CANCELLED, LeaseLapsed("gone")), Outcome(S.CANCELLED, by=EndedBy.REQUEST)):
        life = lifecycle()
        life.request_stop(OUTCOMES[S.COMPLETED])
        life.request_stop(outcome)
        record = life.final_record(110.0)
        assert record.ended_by is outcome.by
        assert (record.error is None) == (outcome.error is None)


@pytest.mark.parametrize("later", OUTCOMES)
def test_a_grade_is_final(later: EpisodeStatus) -> None:
    life = lifecycle(S.GRADING)
    life.request_stop(OUTCOMES[S.COMPLETED])
    graded = Outcome(S.COMPLETED, grade=Grade(0.5))
    life.settle(graded)
    assert not life.request_stop(OUTCOMES[later])
    assert (life.stop, life.decided, life.needs_grade) == (graded, True, False)
    assert life.final_record(110.0).reward == 0.5


def test_nothing_is_decided_before_a_stop_is_requested() -> None:
    life = lifecycle()
    assert (life.decided, life.needs_grade, life.stop) == (False, False, None)


@pytest.mark.parametrize("first", [None, *OUTCOMES])
def test_no_stop_counts_after_the_shutdown_began(first: EpisodeStatus | None) -> None:
    life = lifecycle()
    if first is not None:
        life.request_stop(OUTCOMES[first])
    before = (life.stop, life.decided)
    life.shut_down()
    assert not any(life.request_stop(outcome) for outcome in OUTCOMES.values())
    assert (life.stop, life.decided) == before


# Limits of time


@pytest.mark.parametrize(
    ("status", "now", "overdue"),
    [
        (S.QUEUED, 10_000.0, False),
        (S.PREPARING, 106.0, False),
        (S.PREPARING, 106.1, True),
        (S.RUNNING, 105.1, True),
        (S.GRADING, 10_000.0, False),
    ],
)
def test_the_wall_limit_counts_neither_the_queue_nor_the_grading(
    status: EpisodeStatus, now: float, overdue: bool
) -> None:
    error = lifecycle(status, wall_s=5.0).overdue(now, calls_in_flight=True, last_activity=now)
    assert (error is not None) == overdue
    assert error is None or "limits.wall_s = 5 s" in error.message


@pytest.mark.parametrize(
    ("status", "in_flight", "last_activity", "now", "overdue"),
    [
        (S.PREPARING, False, 0.0, 10_000.0, False),
        (S.RUNNING, False, 0.0, 105.1, True),
        (S.RUNNING, False, 104.0, 105.1, False),
        (S.RUNNING, False, 104.0, 109.1, True),
        (S.RUNNING, True, 104.0, 10_000.0, False),
    ],
)
def test_the_idle_limit_counts_from_the_last_call_and_never_during_one(
    status: EpisodeStatus, in_flight: bool, last_activity: float, now: float, overdue: bool
) -> None:
    life = lifecycle(status, idle_s=5.0)
    error = life.overdue(now, calls_in_flight=in_flight, last_activity=last_activity)
    assert (error is not None) == overdue
    assert error is None or "limits.idle_s = 5 s" in error.message


def test_an_episode_that_stops_already_is_not_overdue() -> None:
    life = lifecycle(wall_s=1.0, idle_s=1.0)
    life.request_stop(OUTCOMES[S.COMPLETED])
    assert life.overdue(10_000.0, calls_in_flight=False, last_activity=0.0) is None


def test_the_clock_may_begin_anew() -> None:
    life = lifecycle(wall_s=5.0, idle_s=3.0)
    life.restart(1_000.0)
    assert life.overdue(1_002.9, calls_in_flight=False, last_activity=0.0) is None
    assert "limits.wall_s" in str(life.overdue(1_005.1, calls_in_flight=True, last_activity=0.0))


def test_time_in_which_an_episode_stands_still_counts_to_no_limit() -> None:
    life = lifecycle(wall_s=5.0, idle_s=3.0)
    life.stand_still(102.0)
    assert life.overdue(10_000.0, calls_in_flight=False, last_activity=0.0) is None
    life.go_on(10_000.0)
    assert life.overdue(10_002.9, calls_in_flight=False, last_activity=0.0) is None
    assert "limits.wall_s" in str(life.overdue(10_003.1, calls_in_flight=True, last_activity=0.0))
    assert "limits.idle_s" in str(lifecycle(idle_s=3.0).overdue(103.1, calls_in_flight=False, last_activity=0.0))
