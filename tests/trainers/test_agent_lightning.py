"""Rollouts in Agent Lightning's own advantages and losses, beside the batch of its adapter."""

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
        "verl",  # its Python has Agent Lightning, too
        "agent_lightning_program",
        tmp_path_factory.mktemp("agent_lightning"),
        recorded_url=recorded_door.url,
        url=playing_door.url,
        key=playing_door.key,
    )


@pytest.fixture
def cases(seen: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = seen["cases"]
    return found


def test_the_batch_is_that_of_its_adapter(seen: dict[str, Any]) -> None:
    """But for the rewards' type: its bfloat16 would round them."""
    found = seen["its own"]
    assert found["differ"] == []
    assert found["dtypes"] == {"token_level_scores": ["torch.float32", "torch.bfloat16"]}
    assert found["texts"]
    assert len(found["names"]) == 9


def test_three_rows_beside_one_are_two_in_its_baseline(cases: dict[str, Any]) -> None:
    assert cases["grpo"] == [[0.5], [0.5], [0.5], [-0.5]]
    assert cases["rloo"] == [[1.0], [1.0], [1.0], [-1.0]]
    assert cases["grpo over rows"] == [[0.25], [0.25], [0.25], [-0.75]], "verl's own, of the same rows"


def test_the_ungraded_and_the_untrained_have_no_row(cases: dict[str, Any]) -> None:
    assert cases["ungraded"] == [[0.5], [-0.5]]
    assert cases["nothing"] == [[0.5], [-0.5]]
    assert {shape[0] for shape in cases["none"].values()} == {0}


def test_a_rollout_without_a_baseline_is_marked_to_be_dropped(cases: dict[str, Any]) -> None:
    assert cases["dropped"] == [False] * 4 + [True] * 2


def test_a_row_ends_with_its_last_trained_token_and_its_reward(cases: dict[str, Any]) -> None:
    assert cases["tail"] == [5, 5]
    assert cases["tail rewards"] == [[0.0, 1.0], [0.0, 0.0]]
    assert cases["lengths"] == [[0.5], [-0.5]]


def test_a_row_that_does_not_fit_is_refused(cases: dict[str, Any]) -> None:
    assert "has a prompt of 3 tokens and a response of 7 where 2 and 12 fit" in cases["long prompt"]
    assert "a response of 7 where 6 and 6 fit" in cases["long response"]


def test_each_rollout_weighs_the_same_in_its_losses(seen: dict[str, Any]) -> None:
    """Of 4 rows, three one rollout's with 2 trained tokens each, one of another with 4."""
    for found in seen["losses"]:
        assert found["by rollout"] == pytest.approx({"g-0": -0.5 / 4, "g-1": 0.5 / 4})
        assert found["outside"] == 0.0
    assert seen["losses"][0]["loss"] == pytest.approx(0.0, abs=1e-7)


def test_the_recorded_run_is_in_the_batch_bit_by_bit(seen: dict[str, Any]) -> None:
    found = seen["recorded"]
    assert found["exact"] == found["rows"] > 32
    assert found["trained"] == found["listed"] > 0
    assert found["advantages"] == [True, False], "on trained tokens, on others"
    types, step = "its adapter's `DataProto`", "its advantages over rollouts and losses, gradients"
    compared.say("Agent Lightning 1.0.2", types, step, found["rows"], found["trained"])


def test_the_trainer_of_the_page_plays_a_step_and_a_validation(seen: dict[str, Any]) -> None:
    found = seen["played"]
    assert found["used"]
    assert found["trained"]
    assert found["updates"] == [3]
    assert found["told"] == ["resume", "abort"] * 2
    assert (found["groups"], found["rollouts"]) == (2, 4)
    assert found["shapes"] == {"prompts": [2048], "responses": [8192], "advantages": [8192]}
    metrics = found["metrics"]
    assert metrics["training/n_rollouts"] == metrics["training/n_rollouts_w_reward"] == 4
    assert metrics["training/rollout_level_advantage/n_rollouts"] == 4
    assert metrics["training/n_sample_trained"] >= 4
    assert found["validation"]["val/n_rollouts"] == 2
    assert 0.0 <= found["validation"]["val/reward"] <= 1.0
    assert found["elsewhere"] >= 4


def test_it_skips_a_step_without_rows(seen: dict[str, Any]) -> None:
    assert seen["played"]["ungraded"] is None


def test_a_set_up_that_cannot_train_is_refused_at_start(seen: dict[str, Any]) -> None:
    found = seen["played"]
    assert found["async"].startswith("set agentlightning.async_rollout.enabled=false")
    assert found["transition"].startswith("set agentlightning.trace_aggregator.level=trajectory")
    assert found["no task"].startswith("the row names no task")
