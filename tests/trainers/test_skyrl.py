"""Rollouts in SkyRL's own code: validated, batched and with its advantages; its generator against a server."""

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
        "skyrl_program",
        tmp_path_factory.mktemp("skyrl"),
        recorded_url=recorded_door.url,
        url=playing_door.url,
        key=playing_door.key,
    )


def test_three_rows_beside_one_are_two_in_the_baseline(seen: dict[str, Any]) -> None:
    last, rewards, advantages = seen["silent"]["three"]
    assert last == [False, False, True, True]
    assert rewards == [1.0, 1.0, 1.0, 0.0]
    assert advantages == [0.5, 0.5, 0.5, -0.5]


def test_a_rollout_without_a_reward_has_no_row(seen: dict[str, Any]) -> None:
    rewards, advantages, metrics = seen["silent"]["ungraded"]
    assert rewards == [1.0, 0.0]
    assert advantages == [0.5, -0.5]
    assert (metrics["turnstile/rollouts"], metrics["turnstile/ungraded"]) == (3, 1)
    assert seen["silent"]["joined"]["turnstile/rollouts"] == 5


def test_nothing_trained_counts_in_the_baseline_all_the_same(seen: dict[str, Any]) -> None:
    mask, rewards, advantages = seen["silent"]["nothing"]
    assert sum(mask) == 0
    assert rewards == [0.0, 1.0]
    assert advantages == [-0.5, 0.5]


def test_a_group_without_a_reward_trains_nothing_and_leaves_the_mean_alone(seen: dict[str, Any]) -> None:
    rewards, mask, advantages = seen["silent"]["lost"]
    assert rewards == [1.0, 0.0, 0.5]
    assert mask == [0]
    assert advantages[:2] == [0.5, -0.5]
    assert seen["silent"]["lost_boundaries"] == [[0, 2], [2, 3]]
    assert seen["silent"]["lost_mean"] == 0.5


def test_a_group_of_one_has_its_reward_as_skyrl_says(seen: dict[str, Any]) -> None:
    assert seen["silent"]["one"] == [1.0], "SkyRL's own rule: no mean of one"
    assert seen["silent"]["one_left"] == [0.0, 0.0], "what is left of a group of three trains nothing"


def test_lengths_that_differ_are_found_by_its_validator(seen: dict[str, Any]) -> None:
    assert "same length" in seen["silent"]["short"]


def test_what_cannot_be_said_is_refused_with_the_setting_that_helps(seen: dict[str, Any]) -> None:
    silent = seen["silent"]
    assert "has 2 rows" in silent["rows_without_step_wise"]
    for case in ("rows_without_step_wise", "ungraded_without_step_wise"):
        assert "generator.step_wise_trajectories=true" in silent[case]
    assert "none of 2 rollouts has a reward" in silent["none"]
    assert silent["cut"] == ["length"]


def test_the_recorded_run_is_in_its_tensors_bit_by_bit(seen: dict[str, Any]) -> None:
    found = seen["recorded"]
    assert found["rollouts"] == 32
    assert found["trajectories"] == found["graded"]
    rows, expected, exact = found["rows"]
    assert exact == expected > found["graded"] // 2
    assert rows - expected < found["graded"], "masked rows of those with nothing to train"
    assert len(set(found["tokens"])) == 1
    types = "`GeneratorOutput`, its validator and tensors"
    compared.say("SkyRL 0.4.0", types, "its step-wise GRPO", exact, found["tokens"][0])


def test_the_generator_plays_a_batch_in_its_order(seen: dict[str, Any]) -> None:
    played = seen["played"]
    assert played["fields"] == []
    assert played["order"] == ["p1_0", "p1_1", "p2_0", "p2_1"]
    assert all(played["trained"])
    assert played["groups"] == 2
    assert played["temperature"] == [0.7]
    assert played["metadata"] == {"evaluation": False, "global_step": 3, "instance_id": "p1"}


def test_a_greedy_evaluation_is_one_row_for_each_prompt(seen: dict[str, Any]) -> None:
    rows, trained, shortest = seen["played"]["greedy"]
    assert (rows, trained) == (4, 0)
    assert shortest > 1


def test_a_wrong_task_and_a_failing_agent_end_the_run_with_their_reason(seen: dict[str, Any]) -> None:
    assert "unknown" in seen["played"]["unknown"]
    assert "none of 4 rollouts has a reward" in seen["played"]["failing"]


def test_the_example_of_the_page_makes_a_generator(seen: dict[str, Any]) -> None:
    assert seen["example"] == ["TurnstileGenerator", "True"]
