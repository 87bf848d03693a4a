"""``turnstile.credit`` against cases that are worked out by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from turnstile.credit import (
    capped_segments,
    leave_one_out,
    row_weights,
    segment_rewards,
    spread_over_turns,
    staleness_weights,
    truncated_importance,
    turn_returns,
)
from turnstile.groups import group_advantages


def test_leave_one_out_compares_with_the_others_only() -> None:
    assert leave_one_out({"a": 1.0, "b": 0.0, "c": 0.0}) == {"a": 1.0, "b": -0.5, "c": -0.5}
    assert leave_one_out({"a": 1.0}) == {"a": 0.0}
    assert leave_one_out({}) == {}


@given(st.lists(st.floats(-10, 10), min_size=2, max_size=8))
def test_leave_one_out_is_dr_grpo_times_n_over_n_minus_one(rewards: list[float]) -> None:
    given_rewards = dict(enumerate(rewards))
    centred = group_advantages(given_rewards, scale="none")
    n = len(rewards)
    for key, advantage in leave_one_out(given_rewards).items():
        assert advantage == pytest.approx(centred[key] * n / (n - 1), abs=1e-9)


def test_a_rollout_of_three_rows_weighs_as_much_as_one_of_one() -> None:
    rollouts, trained = ["a", "a", "a", "b", "c"], [1, 2, 1, 2, 0]
    weights = row_weights(rollouts, trained)
    assert weights.tolist() == [1 / 8, 1 / 8, 1 / 8, 1 / 4, 0.0]
    assert (weights * trained).sum() == 1.0
    assert row_weights(rollouts, trained, per="token").tolist() == [1 / 6] * 4 + [0.0]
    assert row_weights(rollouts, trained, per="batch", length=10).tolist() == [1 / 20] * 4 + [0.0]
    assert row_weights([], []).tolist() == []
    with pytest.raises(ValueError, match="2 rollout ids and 1 token"):
        row_weights(["a", "b"], [1])


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 5)), min_size=1, max_size=12))
def test_a_rollout_counts_once_however_its_tokens_are_cut_into_rows(rows: list[tuple[int, int]]) -> None:
    rollouts, trained = zip(*rows, strict=True)
    shares = row_weights(rollouts, trained) * np.array(trained)
    training = {rollout for rollout, count in rows if count}
    for rollout in set(rollouts):
        share = sum(shares[i] for i, one in enumerate(rollouts) if one == rollout)
        assert share == pytest.approx(1 / len(training) if rollout in training else 0.0)


def test_importance_is_capped_by_token_or_by_row_and_blind_to_what_is_masked() -> None:
    recorded, trainer = [0.0, -1.0, -1.0], [9.0, -1.0 + math.log(1.5), -1.0 + math.log(4.0)]
    mask = [0, 1, 1]
    assert truncated_importance(trainer, recorded, mask).tolist() == pytest.approx([0.0, 1.5, 2.0])
    row = truncated_importance(trainer, recorded, mask, level="sequence", cap=10.0)
    assert row.tolist() == pytest.approx([0.0, 6.0, 6.0])
    assert truncated_importance([-1.0], [-9999.0], [1], cap=3.0).tolist() == pytest.approx([3.0])
    assert truncated_importance([math.nan, -1.0], [0.0, -1.0], [0, 1]).tolist() == [0.0, 1.0]


def test_importance_of_broken_numbers_is_refused() -> None:
    with pytest.raises(ValueError, match="shapes differ"):
        truncated_importance([-1.0], [-1.0, -1.0], [1])
    with pytest.raises(ValueError, match="not finite"):
        truncated_importance([math.nan], [-1.0], [1])
    with pytest.raises(ValueError, match="above 0"):
        truncated_importance([-1.0], [-1.0], [1], cap=0.0)


def test_old_tokens_weigh_less_and_those_that_nobody_sampled_nothing() -> None:
    weights = staleness_weights([-1, 7, 5, 3], 7, half_life=2.0)
    assert weights.tolist() == [0.0, 1.0, 0.5, 0.25]
    assert staleness_weights([7, 5, 3], 7, half_life=2.0, drop_above=2).tolist() == [1.0, 0.5, 0.0]
    with pytest.raises(ValueError, match="versions up to 8 at 7"):
        staleness_weights([8], 7, half_life=1.0)


def test_a_turn_gets_what_follows_it() -> None:
    assert turn_returns([1.0, None, 2.0], 4.0) == [7.0, 6.0, 6.0]
    assert turn_returns([1.0, None, 2.0], 4.0, gamma=0.5) == [2.5, 3.0, 6.0]
    assert turn_returns([]) == []


def test_values_of_turns_lie_on_their_tokens() -> None:
    assert spread_over_turns([2.0, 3.0], [(1, 3), (4, 5)], 6).tolist() == [0, 2, 2, 0, 3, 0]
    for spans in ([(1, 3), (2, 5)], [(1, 3), (4, 7)]):
        with pytest.raises(ValueError, match="overlaps"):
            spread_over_turns([2.0, 3.0], spans, 6)


def test_a_reward_is_shared_by_segments() -> None:
    assert segment_rewards(1.0, [3, 1]) == [1.0, 1.0]
    assert segment_rewards(1.0, [3, 1], share="uniform") == [0.5, 0.5]
    assert segment_rewards(1.0, [3, 1], share="last") == [0.0, 1.0]
    by_tokens = segment_rewards(1.0, [3, 1], share=lambda r, trained: [r * t / sum(trained) for t in trained])
    assert by_tokens == [0.75, 0.25]
    assert segment_rewards(1.0, [], share="uniform") == segment_rewards(1.0, [], share="last") == []
    with pytest.raises(ValueError, match="1 shares for 2"):
        segment_rewards(1.0, [3, 1], share=lambda r, _: [r])


def test_segments_are_capped_and_the_last_one_is_kept() -> None:
    trained = [4, 0, 2, 3, 0, 1, 0]
    assert capped_segments(trained, 9) == [0, 2, 3, 5]
    assert capped_segments(trained, 2) == [3, 5]
    assert capped_segments(trained, 1) == [5]
    assert capped_segments([0, 0], 3) == []
    picks = {tuple(capped_segments(trained, 2, np.random.default_rng(seed))) for seed in range(40)}
    assert picks == {(0, 5), (2, 5), (3, 5)}
    with pytest.raises(ValueError, match="at most 0"):
        capped_segments(trained, 0)
