"""Rollouts in AReaL's own checks, advantages and loss."""

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
        "verl",  # its Python has AReaL, too
        "areal_program",
        tmp_path_factory.mktemp("areal"),
        recorded_url=recorded_door.url,
        url=playing_door.url,
        key=playing_door.key,
    )


@pytest.fixture
def cases(seen: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = seen["cases"]
    return found


def test_three_rows_beside_one_are_two_in_the_baseline(cases: dict[str, Any]) -> None:
    assert cases["three"] == [[0.5], [0.5], [0.5], [-0.5]]
    assert cases["its slices"] == [0.0, 0.0, 0.5, -0.5], "AReaL's own, of the same rows"


def test_the_ungraded_enter_nothing_and_the_untrained_the_baseline(cases: dict[str, Any]) -> None:
    assert cases["ungraded"] == [[0.5], [-0.5]]
    assert cases["nothing"] == [[-0.5]]
    assert cases["one"] == [[0.0]]
    assert cases["none graded"] is None


def test_a_row_ends_with_its_last_trained_token(cases: dict[str, Any]) -> None:
    """AReaL would lose a reward that lies behind it."""
    assert cases["tail lengths"] == [5, 10]
    assert cases["tail"] == [[0.5], [-0.5]]
    assert cases["tail whole"] == 0.0


def test_each_token_has_the_number_of_its_weights(cases: dict[str, Any]) -> None:
    assert cases["versions"] == [
        [-1, -1, -1, 0, 0, -1, -1, -1, -1, -1],
        [-1, -1, -1, 0, 0, -1, -1, -1, 1, 1],
    ]
    assert cases["odd"].startswith("ValueError: the weights 'run-7' have no number")


def test_groups_of_different_lengths_are_concatenated_by_areal(cases: dict[str, Any]) -> None:
    assert cases["concatenated"] == [4, 10]
    assert cases["dtypes"] == {
        **dict.fromkeys(("input_ids", "attention_mask", "loss_mask", "versions"), "torch.int64"),
        **dict.fromkeys(("logprobs", "rewards"), "torch.float32"),
    }


def test_a_row_of_the_data_set_without_a_task_is_refused(cases: dict[str, Any]) -> None:
    assert cases["no task"].startswith("InvalidRequest: the row names no task")


def test_its_loss_moves_the_trained_tokens_alone(seen: dict[str, Any]) -> None:
    assert seen["loss"]["loss"] == pytest.approx(seen["loss"]["wanted"])
    assert seen["loss"]["outside"] == 0.0 < seen["loss"]["inside"]


def test_the_recorded_run_is_in_the_tensors_bit_by_bit(seen: dict[str, Any]) -> None:
    found = seen["recorded"]
    assert found["exact"] == found["rows"] > 32
    assert found["trained"] == found["listed"] > 0
    types, step = "the check and concatenation of its executor", "its actor's advantages and loss, gradients"
    compared.say("AReaL 1.0.4", types, step, found["rows"], found["trained"])


def test_the_workflow_of_the_page_plays_groups(seen: dict[str, Any]) -> None:
    found = seen["played"]
    assert found["groups"] == 2
    assert all(rows >= 4 for rows in found["rows"])
    assert found["sums"] == pytest.approx([0.0] * len(found["sums"]), abs=1e-5)
    assert {"rollout/reward", "rollout/ungraded_rollouts"} <= set(found["stats"])
