"""Forests as verifiers' own traces: exact both ways."""

from __future__ import annotations

from typing import Any

import pytest

from control_support import Door
from trainers import compared
from trainers.trainer_python import answer_of

pytestmark = pytest.mark.trainers


@pytest.fixture(scope="module")
def seen(recorded_door: Door, playing_door: Door, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return answer_of(
        "skyrl",
        "verifiers_program",
        tmp_path_factory.mktemp("verifiers"),
        recorded_url=recorded_door.url,
        url=playing_door.url,
        key=playing_door.key,
    )


def test_the_recorded_run_comes_back_bit_by_bit(seen: dict[str, Any]) -> None:
    found = seen["recorded"]
    assert found["same"] == found["packed"] == found["graded"] > 16
    assert len(set(found["trained"])) == 1


def test_each_branch_of_a_trace_is_a_flat_row(seen: dict[str, Any]) -> None:
    branches, of_rows = seen["recorded"]["branches"]
    assert branches == of_rows
    tokens = seen["recorded"]["trained"][0]
    compared.say("verifiers 0.4.0", "`Trace`, both ways", "none: prime-rl is not published", branches, tokens)
    assert seen["recorded"]["several"] > 0


def test_a_rollout_without_a_reward_is_no_trace_and_one_of_zero_is(seen: dict[str, Any]) -> None:
    assert seen["cases"]["ungraded"] is None
    assert seen["cases"]["zero"] == 0.0


def test_lengths_that_differ_and_foreign_traces_are_refused(seen: dict[str, Any]) -> None:
    assert "log-probabilities" in seen["cases"]["short"]
    assert "not of turnstile.exporters.verifiers" in seen["cases"]["foreign"]


def test_the_example_of_the_page_makes_traces(seen: dict[str, Any]) -> None:
    assert seen["example"] >= 1


def test_vf_eval_plays_an_agent_of_a_server_on_its_tasks(seen: dict[str, Any]) -> None:
    run = seen["evaluated"]["tool-loop"]
    assert run["code"] == 0, run["said"]
    assert len(run["episodes"]) == 4, run["said"]
    assert sorted(episode["task"]["key"] for episode in run["episodes"]) == ["sum-1", "sum-1", "sum-2", "sum-2"]
    for episode in run["episodes"]:
        assert episode["ok"], episode["errors"]
        [trace] = episode["traces"]
        assert trace["rewards"]["reward"]["score"] in (0.0, 1.0)
        assert any(any(node["mask"]) for node in trace["nodes"])


def test_an_episode_without_a_reward_is_an_error_with_its_reason(seen: dict[str, Any]) -> None:
    run = seen["evaluated"]["no-such-agent"]
    assert len(run["episodes"]) == 4, run["said"]
    for episode in run["episodes"]:
        assert (episode["ok"], episode["traces"]) == (False, [])
        assert "no-such-agent" in episode["errors"][-1]["message"]
