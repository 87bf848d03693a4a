"""One rollout is one sample of its group's baseline, however many rows it has."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from client.trainer_types import group_of, rollout
from turnstile import advantages, by_group, has_signal
from turnstile.groups import group_advantages
from turnstile.models import EpisodeStatus

rewards = st.floats(-100, 100, allow_nan=False)


def test_sibling_rows_do_not_move_the_baseline() -> None:
    """Row-wise the rewards are [1, 1, 1, 0], baseline 0.75; reward divided by rows gives 1/6. It is 0.5."""
    found = advantages(group_of(1.0, 0.0, rows={0: 3}), scale="none")
    assert found == {"g-0": 0.5, "g-1": -0.5}


@given(st.lists(st.tuples(st.none() | rewards, st.integers(1, 4)), max_size=6), st.sampled_from(["std", "none"]))
def test_the_number_of_rows_of_a_rollout_changes_nothing(
    shape: list[tuple[float | None, int]], scale: str
) -> None:
    fanned = [rollout(reward, rows, number=n) for n, (reward, rows) in enumerate(shape)]
    plain = [rollout(reward, 1, number=n) for n, (reward, _) in enumerate(shape)]
    assert advantages(fanned, scale=scale) == advantages(plain, scale=scale)  # type: ignore[arg-type]


def test_each_group_has_its_own_baseline() -> None:
    mixed = [
        rollout(1.0, group="a", number=0),
        rollout(5.0, group="b", number=0),
        rollout(0.0, group="a", number=1),
        rollout(3.0, group="b", number=1),
    ]
    assert list(by_group(mixed)) == ["a", "b"]
    assert advantages(mixed, scale="none") == {"a-0": 0.5, "b-0": 1.0, "a-1": -0.5, "b-1": -1.0}


def test_a_rollout_without_a_reward_is_no_zero() -> None:
    assert advantages(group_of(1.0, None, 0.0), scale="none") == {"g-0": 0.5, "g-2": -0.5}
    assert advantages(group_of(None, None)) == {}


@pytest.mark.parametrize("status", [EpisodeStatus.FAILED, EpisodeStatus.CANCELLED])
def test_a_failed_rollout_is_no_zero_even_where_its_episode_has_a_reward(status: EpisodeStatus) -> None:
    group = [*group_of(1.0, 0.0), rollout(0.0, number=2, status=status)]
    assert advantages(group, scale="none") == {"g-0": 0.5, "g-1": -0.5}


def test_the_deviation_is_that_of_a_sample() -> None:
    found = advantages(group_of(1.0, 0.0, 0.0, 0.0))
    assert found["g-0"] == pytest.approx(1.5, abs=1e-5)
    assert found["g-1"] == pytest.approx(-0.5, abs=1e-5)


@pytest.mark.parametrize("scale", ["std", "none"])
@pytest.mark.parametrize("group", [(0.7,), (0.7, None), (0.1,) * 3, (0.1,) * 7, (-3.3, -3.3, None)])
def test_one_reward_and_equal_rewards_give_exactly_zero(group: tuple[float | None, ...], scale: str) -> None:
    found = advantages(group_of(*group), scale=scale)  # type: ignore[arg-type]
    assert set(found.values()) == {0.0}
    assert len(found) == sum(reward is not None for reward in group)
    assert not has_signal(group_of(*group))


@given(st.dictionaries(st.integers(), rewards, min_size=1, max_size=8))
def test_advantages_sum_to_zero_keep_the_order_and_have_at_most_unit_deviation(given_: dict[int, float]) -> None:
    found = group_advantages(given_)
    assert found.keys() == given_.keys()
    assert math.fsum(found.values()) == pytest.approx(0.0, abs=1e-6)
    by_reward = [found[key] for key in sorted(given_, key=given_.__getitem__)]
    assert by_reward == sorted(by_reward)
    if len(found) > 1:
        assert math.fsum(value**2 for value in found.values()) / (len(found) - 1) <= 1.0 + 1e-9


@given(st.lists(st.none() | st.sampled_from([0.0, 0.5, 1.0]), max_size=5))
def test_a_signal_is_two_different_rewards(group: list[float | None]) -> None:
    graded = [reward for reward in group if reward is not None]
    assert has_signal(group_of(*group)) == any(reward != graded[0] for reward in graded)
