"""Statistics of many episodes, from their rows: against hand-made cases, and against counting one by one."""

from __future__ import annotations

import math
from itertools import combinations
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from client.trainer_types import rollout
from turnstile.models import (
    EpisodeFilter,
    EpisodeStats,
    EpisodeStatus,
    EpisodeSummary,
    Fault,
    PartSeconds,
    StatsKey,
    group_advantages,
    group_summaries,
    pass_at_k,
    statistics_by,
    summary_of,
)
from turnstile_server.episodes.selection import EpisodeSelection


def row(**fields: Any) -> EpisodeSummary:
    base: dict[str, Any] = dict.fromkeys(EpisodeSummary.model_fields)
    numbers = ("new_conversations", "attempt", "weight_versions", "turns", "roots", "branches", "regraded")
    base |= dict.fromkeys((*numbers, "sampled_tokens", "trained_tokens", "discarded_tokens"), 0)
    base |= {"episode_id": "ep", "rollout_id": "ep", "task": "t", "agent": "a", "tags": (), "stale": False}
    base |= {
        "untrained": {},
        "breaks": {},
        "created_at": 0.0,
        "seconds": PartSeconds(),
        "forked": False,
        "why": "",
    }
    return EpisodeSummary.model_validate({**base, "status": EpisodeStatus.COMPLETED, **fields})


summaries = st.lists(
    st.builds(
        row,
        task=st.sampled_from(["t0", "t1"]),
        tags=st.sampled_from([(), ("x",), ("x", "y")]),
        train_step=st.sampled_from([None, 0, 10, 9]),
        group_id=st.sampled_from([None, "g0", "g1"]),
        weight_version=st.sampled_from([None, "v1", "v2"]),
        status=st.sampled_from(EpisodeStatus),
        fault=st.sampled_from([None, *Fault]),
        error_type=st.sampled_from([None, "agent_failed"]),
        reward=st.sampled_from([None, 0.0, 0.5, 1.0, -1.0]),
        sampled_tokens=st.integers(0, 9),
        breaks=st.dictionaries(st.sampled_from(["history_edited", "tools_changed"]), st.integers(1, 3)),
        used=st.sampled_from([None, True, False]),
        lag=st.sampled_from([None, 0.0, 2.5]),
        oldest=st.sampled_from([None, 0, 3]),
        created_at=st.floats(0, 100),
        ended_s=st.none() | st.floats(0, 50),
        seconds=st.builds(PartSeconds, agent=st.floats(0, 9)),
    ),
    max_size=12,
)


@given(summaries, st.lists(st.sampled_from(["task", "step", "version", "status", "group"]), unique=True))
def test_every_episode_is_in_one_row_and_the_rows_add_up(rows: list[EpisodeSummary], by: list[StatsKey]) -> None:
    found = statistics_by(rows, by, bucket_s=7.0)
    assert sum(each.episodes for each in found.rows) == len(rows) == found.total.episodes
    for name in ("graded", "solved", "turns", "sampled_tokens", "stale"):
        assert sum(getattr(each, name) for each in found.rows) == getattr(found.total, name)
    rewards = [each.reward for each in rows if each.reward is not None]
    if rewards:
        assert found.total.reward_mean == pytest.approx(sum(rewards) / len(rewards))
        assert (found.total.reward_std is None) == (len(rewards) < 2)
        assert min(rewards) == found.total.reward_min <= found.total.reward_mean <= (found.total.reward_max or 0.0)
    assert found.total.seconds["agent"] == pytest.approx(sum(each.seconds.agent for each in rows))
    assert len({tuple(each.key.items()) for each in found.rows}) == len(found.rows)


@given(st.integers(1, 7), st.data())
def test_pass_at_k_is_the_chance_over_all_choices_of_k(n: int, data: st.DataObject) -> None:
    right, k = data.draw(st.integers(0, n)), data.draw(st.integers(1, n))
    outcomes = [index < right for index in range(n)]
    choices = list(combinations(outcomes, k))
    found = pass_at_k({("t", "a", None): (n, right)}, k)
    assert found is not None
    assert found.value == pytest.approx(sum(any(choice) for choice in choices) / len(choices))


def test_pass_at_k_is_the_mean_over_the_tasks_that_have_k() -> None:
    rows = [row(task="a", reward=1.0)] + [row(task="b", reward=reward) for reward in (0.0, 1.0, 0.0, None)]
    found = statistics_by(rows).total.pass_at_k
    assert [(each.k, each.tasks) for each in found] == [(1, 2), (2, 1)]
    assert [each.value for each in found] == pytest.approx([(1 + 1 / 3) / 2, 2 / 3])


def test_pass_at_k_does_not_mix_agents_and_weights() -> None:
    """Pooled, the four rollouts would have pass@2 = 5/6: neither agent nor either weights have that."""
    rows = [
        row(agent=agent, weight_version=version, reward=reward)
        for agent, version, reward in (("a", "v1", 1.0), ("a", "v1", 1.0), ("b", "v1", 0.0), ("b", "v1", 0.0))
    ]
    found = {each.k: each for each in statistics_by(rows).total.pass_at_k}
    assert {k: (each.value, each.sets, each.tasks) for k, each in found.items()} == {
        1: (0.5, 2, 1),
        2: (0.5, 2, 1),
    }
    by_weights = [each.model_copy(update={"agent": "a", "weight_version": each.agent}) for each in rows]
    assert statistics_by(by_weights).total.pass_at_k == statistics_by(rows).total.pass_at_k
    hosted = {"agent": "a", "weight_version": None}
    of_hosted = [each.model_copy(update={**hosted, "upstream": each.agent}) for each in rows]
    assert statistics_by(of_hosted).total.pass_at_k == statistics_by(rows).total.pass_at_k


def test_the_deviation_is_the_one_of_groups_and_the_error_that_of_the_mean() -> None:
    rows = [row(group_id="g", reward=reward) for reward in (0.0, 0.0, 1.0, 1.0)]
    total = statistics_by(rows).total
    (group,) = group_summaries(rows)
    assert total.reward_std == group.reward_std == pytest.approx((1 / 3) ** 0.5)
    assert total.reward_error == pytest.approx((1 / 3) ** 0.5 / 2)
    alone = statistics_by(rows[:1]).total
    assert (alone.reward_mean, alone.reward_std, alone.reward_error) == (0.0, None, None)


def test_a_further_conversation_is_no_break() -> None:
    stats = EpisodeStats(breaks={"new_conversation": 2, "reply_edited": 1})
    episode = rollout(1.0, stats=stats).episode
    assert episode is not None
    found = summary_of(episode)
    assert (found.breaks, found.new_conversations) == ({"reply_edited": 1}, 2)
    for condition, taken in (("any", True), ("new_conversation", True), ("history_edited", False)):
        assert EpisodeSelection(EpisodeFilter(breaks=condition)).takes(found, lambda _: pytest.fail("no")) is taken
    only_new = found.model_copy(update={"breaks": {}})
    assert not EpisodeSelection(EpisodeFilter(breaks="any")).takes(only_new, lambda _: pytest.fail("no"))
    total = statistics_by([found, found]).total
    assert (total.breaks, total.new_conversations) == ({"reply_edited": 2}, 4)


def test_groups_with_equal_rewards_have_no_signal() -> None:
    rewards = {"g0": (1.0, 1.0, None), "g1": (0.0, 1.0), "g2": (1.0,), None: (0.0, 0.0)}
    rows = [row(group_id=group, reward=reward) for group, found in rewards.items() for reward in found]
    total = statistics_by(rows).total
    assert (total.groups, total.groups_without_signal) == (2, 1)


def test_rows_are_numbers_in_order_then_text_then_what_has_none() -> None:
    rows = [row(train_step=step) for step in (10, None, 9)]
    assert [each.key["step"] for each in statistics_by(rows, ["step"]).rows] == [9, 10, None]
    rows = [row(tags=tags, reward=1.0) for tags in (("b", "a"), ())]
    found = statistics_by(rows, ["tag"])
    assert [each.key["tag"] for each in found.rows] == ["a", "b", None]
    assert found.total.episodes == 2


def test_names_are_in_the_order_of_their_numbers() -> None:
    rows = [row(weight_version=version) for version in ("v10", "v9", None, "v9.12", "base", "10", "9")]
    found = [each.key["version"] for each in statistics_by(rows, ["version"]).rows]
    assert found == ["9", "10", "base", "v9", "v9.12", "v10", None]


def test_a_tag_that_a_task_has_twice_counts_once() -> None:
    (found,) = statistics_by([row(tags=("x", "x"), reward=1.0)], ["tag"]).rows
    assert (found.episodes, found.graded) == (1, 1)


@pytest.mark.parametrize("huge", [1e200, 1.7e308])
def test_huge_rewards_have_statistics(huge: float) -> None:
    total = statistics_by([row(reward=reward) for reward in (huge, -huge)]).total
    assert total.reward_mean == 0.0
    assert total.reward_std == pytest.approx(huge * 2**0.5) if huge < 1e300 else total.reward_std is not None
    assert group_advantages({"a": huge, "b": -huge}) == pytest.approx({"a": 0.5**0.5, "b": -(0.5**0.5)})
    assert group_advantages({"a": huge, "b": 0.0}, scale="none") == {"a": huge / 2, "b": -huge / 2}


@given(st.floats(allow_nan=False, allow_infinity=False), st.integers(2, 9))
def test_equal_rewards_deviate_by_nothing(reward: float, count: int) -> None:
    total = statistics_by([row(reward=reward)] * count).total
    assert (total.reward_mean, total.reward_std) == (reward, 0.0)


def test_a_bucket_is_when_an_episode_ended_or_began_while_it_runs() -> None:
    rows = [row(created_at=59.0, ended_s=2.0), row(created_at=59.0)]
    found = statistics_by(rows, ["status"], bucket_s=60)
    assert [each.key for each in found.rows] == [
        {"status": "completed", "bucket": 0},
        {"status": "completed", "bucket": 60},
    ]


def test_lag_is_of_those_that_a_step_trained() -> None:
    rows = [
        row(used=True, lag=0.5, oldest=1),
        row(used=True, lag=1.5, oldest=4),
        row(used=True),
        row(used=False, lag=9.0, oldest=9),
        row(lag=None),
    ]
    total = statistics_by(rows).total
    assert (total.used, total.left_out, total.lag_mean, total.lag_max) == (3, 1, 1.0, 4)


def test_no_episode_has_no_figures() -> None:
    total = statistics_by([]).total
    assert (total.reward_mean, total.reward_std, total.lag_mean, total.pass_at_k) == (None, None, None, ())
    assert total.trained_share == 1.0
    assert math.fsum(total.seconds.values()) == 0.0
