"""When an engine is started again: by policy, with a clock of the test's own."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bounded import bounded
from turnstile_server.engines.launch.restarts import GiveUp, Restart, RestartPolicy
from turnstile_server.settings import LaunchSettings


def policy(**changes: Any) -> RestartPolicy:
    defaults = {"max_restarts": 3, "restart_window_s": 100.0, "backoff_start_s": 1.0, "backoff_ceiling_s": 3.0}
    return RestartPolicy(bounded(LaunchSettings, **(defaults | changes)))


@pytest.mark.parametrize(
    ("restart", "code", "again"),
    [
        ("never", 1, False),
        ("never", 0, False),
        ("on_failure", 1, True),
        ("on_failure", -9, True),
        ("on_failure", None, True),
        ("on_failure", 0, False),
        ("always", 0, True),
        ("always", 1, True),
    ],
)
def test_the_exit_code_counts_as_the_policy_says(restart: str, code: int | None, again: bool) -> None:
    assert isinstance(policy(restart=restart).after_exit(0.0, code), Restart) == again


def test_by_default_an_engine_is_started_again_whatever_its_exit_code() -> None:
    assert isinstance(policy().after_exit(0.0, 0), Restart)


def test_each_restart_in_the_window_doubles_the_wait_up_to_the_ceiling() -> None:
    machine = policy()
    assert [machine.after_exit(float(second), 1) for second in range(3)] == [
        Restart(1.0),
        Restart(2.0),
        Restart(3.0),
    ]


def test_one_restart_too_many_within_the_window_gives_up_and_names_the_setting() -> None:
    machine = policy()
    for second in range(3):
        machine.after_exit(float(second), 1)
    last = machine.after_exit(99.0, 1)
    assert isinstance(last, GiveUp)
    assert "launch.max_restarts" in last.reason


def test_restarts_that_left_the_window_are_forgotten() -> None:
    machine = policy()
    for second in range(3):
        machine.after_exit(float(second), 1)
    assert machine.after_exit(101.5, 1) == Restart(2.0)


def test_no_restart_may_be_allowed_at_all() -> None:
    assert isinstance(policy(max_restarts=0).after_exit(0.0, 1), GiveUp)


@given(st.lists(st.floats(0, 1000), max_size=60).map(sorted), st.integers(0, 5), st.floats(1, 500))
def test_no_window_ever_has_more_restarts_than_allowed(times: list[float], most: int, window_s: float) -> None:
    machine = policy(max_restarts=most, restart_window_s=window_s)
    made = [now for now in times if isinstance(machine.after_exit(now, 1), Restart)]
    for end in made:
        assert sum(end - window_s < now <= end for now in made) <= most
