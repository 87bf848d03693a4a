"""When a rollout waits and gives up, with a clock and chances of the test."""

from __future__ import annotations

import pytest

from turnstile import ClientSettings, errors
from turnstile._retry import RetryState, backoff_s, is_outage, may_have_happened

SETTINGS = ClientSettings(outage_s=100.0, backoff_s=1.0, backoff_max_s=8.0)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def retries(clock: Clock) -> RetryState:
    return RetryState(SETTINGS, clock, lambda: 1.0)


def test_pauses_double_up_to_a_bound_and_half_of_each_is_chance() -> None:
    assert [backoff_s(count, SETTINGS, lambda: 1.0) for count in range(1, 7)] == [1, 2, 4, 8, 8, 8]
    assert [backoff_s(count, SETTINGS, lambda: 0.0) for count in range(1, 4)] == [0.5, 1, 2]
    assert backoff_s(10**6, SETTINGS, lambda: 1.0) == 8


def test_a_full_server_is_waited_for_without_end(retries: RetryState, clock: Clock) -> None:
    for _ in range(50):
        clock.now += 1000
        assert retries.pause_s(errors.ServerBusy("full")) is not None


def test_what_the_server_says_is_waited_at_least_and_the_bound_at_most(retries: RetryState) -> None:
    assert retries.pause_s(errors.ServerBusy("full", retry_after_s=5.0)) == 5
    assert retries.pause_s(errors.ServerBusy("full", retry_after_s=3600.0)) == 8


def test_an_outage_is_waited_for_until_it_has_lasted_too_long(retries: RetryState, clock: Clock) -> None:
    away = errors.ServerUnavailable("refused")
    clock.now = 7.0
    assert retries.pause_s(away) is not None
    clock.now = 106.0
    assert retries.pause_s(away) is not None
    clock.now = 107.0
    assert retries.pause_s(away) is None


def test_a_server_that_is_full_is_there_again(retries: RetryState, clock: Clock) -> None:
    away = errors.ServerUnavailable("refused")
    retries.pause_s(away)
    clock.now = 99.0
    retries.pause_s(errors.ServerBusy("full"))
    clock.now = 150.0
    assert retries.pause_s(away) is not None


@pytest.mark.parametrize(
    ("error", "outage", "uncertain"),
    [
        (errors.ServerUnavailable("refused"), True, False),
        (errors.ServerUnavailable("hung up", may_have_happened=True), True, True),
        (errors.Timeout("no answer"), True, True),
        (errors.ServerError("its log says why", status=500), True, True),
        (errors.EngineError("away", status=503), True, False),
        (errors.ProtocolError("a proxy", status=502), True, True),
        (errors.ProtocolError("another service", status=404), False, True),
        (errors.InvalidRequest("no such limit", status=422), False, False),
        (errors.AuthError("no key", status=401), False, False),
        (errors.NotFound("no such task", status=404), False, False),
        (errors.Conflict("taken", status=409), False, False),
    ],
)
def test_which_errors_are_outages_and_which_leave_it_open_what_happened(
    error: errors.TurnstileError, outage: bool, uncertain: bool
) -> None:
    assert is_outage(error) is outage
    assert may_have_happened(error) is uncertain
    assert (RetryState(SETTINGS, Clock(), lambda: 1.0).pause_s(error) is not None) is outage
