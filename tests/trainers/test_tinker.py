"""Rollouts as Tinker's own ``Datum``s and the cookbook's groups."""

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
        "tinker_program",
        tmp_path_factory.mktemp("tinker"),
        recorded_url=recorded_door.url,
        url=playing_door.url,
        key=playing_door.key,
    )


def test_each_token_is_predicted_by_the_one_before_it(seen: dict[str, Any]) -> None:
    inputs, targets, advantages, logprobs = seen["cases"]["long"]
    assert inputs == list(range(100, 114))
    assert targets == list(range(101, 115))
    assert advantages == [0.0, 0.0, 0.5, 0.5, *[0.0] * 8, 0.5, 0.5]
    assert logprobs == [0.0, 0.0, -0.5, -0.5, *[0.0] * 8, -0.5, -0.5]
    assert seen["cases"]["keys"] == ["advantages", "logprobs", "target_tokens"]


def test_three_rows_beside_one_are_two_in_the_baseline(seen: dict[str, Any]) -> None:
    assert seen["cases"]["three"] == [[0.5, 3], [-0.5, 1]]
    assert seen["cases"]["sums"] == pytest.approx([0.5, -0.5]), "divided by the rollout's trained tokens"


def test_the_ungraded_enter_nothing_and_the_untrained_the_baseline(seen: dict[str, Any]) -> None:
    assert seen["cases"]["ungraded"] == [0.5, -0.5]
    assert seen["cases"]["nothing"] == [[-0.5, 1], [0.5, 0]]
    assert seen["cases"]["one"] == [[0.0, 0]]


def test_the_cookbooks_groups_have_a_trajectory_for_each_graded_rollout(seen: dict[str, Any]) -> None:
    assert seen["cases"]["groups"] == [[2, [1.0, 0.0]]]
    assert seen["cases"]["cookbook"] == [[0.5, -0.5]]
    assert seen["cases"]["again"] == [[100, 101, 102, 103], [101, 102, 103, 104]]


def test_the_recorded_run_is_in_the_data_bit_by_bit(seen: dict[str, Any]) -> None:
    found = seen["recorded"]
    assert found["exact"] == found["rows"] > 32
    assert len(set(found["trained"])) == 1
    assert found["groups"] == found["graded"] > 0
    types = "`Datum`, `TrajectoryGroup` of the cookbook"
    compared.say("Tinker 0.38.0", types, "none: its service trains", found["rows"], found["trained"][0])


def test_the_example_of_the_page_makes_data(seen: dict[str, Any]) -> None:
    rollouts, *kinds = seen["example"]
    assert rollouts == "4"
    assert kinds in ([], ["Datum"]), "all rewards of a group may be equal"
