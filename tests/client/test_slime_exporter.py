"""Rollouts as rows of slime and miles: lengths, rewards, baselines and what has nothing to train."""

from __future__ import annotations

import asyncio
import importlib
import inspect
import math
import sys
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from client.stub_server import Answer, Play, StubServer
from client.trainer_types import RECORDED, check, group_of, miles_type, recorded_type, rollout, sample
from control_support import Door, running_app
from turnstile import AsyncClient, ClientSettings, errors
from turnstile.exporters.slime import keep_group, post_process_rewards, rows_of, to_samples
from turnstile.exporters.slime_generate import Generate, task_in
from turnstile.models import EpisodeStatus
from waiting import wait_until

TYPES = [
    pytest.param(recorded_type(facts), id=facts["source"].split(",")[0] + str(i))
    for i, facts in enumerate(RECORDED)
]
WITH_ROLLOUT_ID = recorded_type(RECORDED[3])
SPANS = recorded_type(RECORDED[2])


POSTPONED = """
from __future__ import annotations
import enum
from dataclasses import dataclass, field

@dataclass
class Sample:
    index: int | None = None
    group_index: int | None = None
    weight_versions: list[str] = field(default_factory=list)
    class Status(enum.Enum):
        COMPLETED = "completed"
    status: Status = Status.COMPLETED
    metadata: dict = field(default_factory=dict)
"""


def args(**changes: Any) -> Namespace:
    settings: dict[str, Any] = {
        "advantage_estimator": "grpo",
        "rewards_normalization": True,
        "grpo_std_normalization": False,
        "reward_key": None,
        "eval_reward_key": None,
        "n_samples_per_prompt": 4,
        "rollout_batch_size": 1,
    }
    return Namespace(**{**settings, **changes})


def flat(nested: Any) -> list[Any]:
    return [row for group in nested for of_rollout in group for row in of_rollout]


# Rows ----------------------------------------------------


@pytest.mark.parametrize("kind", TYPES)
def test_a_row_has_every_length_that_the_trainer_asserts(kind: Any) -> None:
    [row] = flat(to_samples([rollout(1.0, samples=(sample(trained=(True, False, True)),))], sample_type=kind))
    check(row)
    assert row.tokens == list(range(100, 115))
    assert row.response_length == 12
    assert row.loss_mask == [1, 1, 0, 0, 0, 0, 0, 0, 0, 0, 1, 1]
    assert row.rollout_log_probs[:3] == [-0.5, -0.5, 0.0]
    assert row.status is kind.Status.COMPLETED
    assert (row.reward, row.remove_sample) == (1.0, False)


def test_rewards_of_turns_stand_with_the_tokens_of_the_response_that_they_are_for() -> None:
    given = sample(trained=(True, False, True), turn_rewards=(0.5, 1.0, None))
    [row] = flat(to_samples([rollout(1.0, samples=(given,))], sample_type=SPANS))
    [found] = row.metadata["turnstile"]["turn_rewards"]
    assert found == {"turn_id": "turn_0", "start": 0, "end": 2, "reward": 0.5}
    assert row.loss_mask[found["start"] : found["end"]] == [1, 1]
    [plain] = flat(to_samples([rollout(1.0, samples=(sample(),))], sample_type=SPANS))
    assert "turn_rewards" not in plain.metadata["turnstile"]


def test_the_response_starts_at_the_first_trained_token() -> None:
    [row] = flat(to_samples([rollout(1.0, samples=(sample(trained=(False, True)),))], sample_type=SPANS))
    assert (row.response_length, row.loss_mask) == (2, [1, 1])


@pytest.mark.parametrize("kind", TYPES)
def test_sibling_rows_share_their_numbers_and_each_has_the_full_reward(kind: Any) -> None:
    groups = to_samples(group_of(1.0, 0.0, rows={0: 3}), sample_type=kind, first_index=10, first_group_index=7)
    assert [[len(rows) for rows in group] for group in groups] == [[3, 1]]
    siblings = groups[0][0]
    assert {(row.index, row.group_index, row.reward) for row in siblings} == {(10, 7, 1.0)}
    assert {row.metadata["turnstile"]["rollout_id"] for row in siblings} == {"g-0"}
    assert groups[0][1][0].index == 11
    if "rollout_id" in kind.__dataclass_fields__:
        assert {row.rollout_id for row in siblings} == {10}


def test_weight_versions_are_one_for_each_call_or_spans_at_their_place() -> None:
    twice = rollout(1.0, samples=(sample(trained=(True, False)),))
    assert flat(to_samples([twice], sample_type=WITH_ROLLOUT_ID))[0].weight_versions == ["0", "1"]
    spans = [
        [vars(s) for s in call.spans] for call in flat(to_samples([twice], sample_type=SPANS))[0].weight_versions
    ]
    assert spans == [
        [{"version": "0", "abs_start": 3, "abs_end": 5}],
        [{"version": "1", "abs_start": 8, "abs_end": 10}],
    ]


def test_a_call_across_a_weight_update_gives_both_versions() -> None:
    mixed = sample(weight_version=[-1, -1, -1, 0, 1], weight_version_names=("4", "5"))
    [row] = flat(to_samples([rollout(1.0, samples=(mixed,))], sample_type=WITH_ROLLOUT_ID))
    assert row.weight_versions == ["4", "5"]


@pytest.mark.parametrize("names", [("4",), ()])
def test_a_text_that_was_given_names_no_weights(names: tuple[str, ...]) -> None:
    sampled = [0, 0] if names else [-1, -1]
    given_first = sample(
        trained=(False, bool(names)), weight_version=[-1] * 8 + sampled, weight_version_names=names
    )
    played = rollout(1.0, samples=(given_first,))
    (row,) = rows_of(played, WITH_ROLLOUT_ID(index=0, group_index=0), evaluation=True)
    assert row.weight_versions == list(names)
    (row,) = rows_of(played, SPANS(index=0, group_index=0), evaluation=True)
    assert [[vars(s) for s in call.spans] for call in row.weight_versions] == [
        [],
        [{"version": "4", "abs_start": 8, "abs_end": 10}] if names else [],
    ]


def test_rows_keep_what_the_blank_holds_and_share_none_of_it() -> None:
    blank = SPANS(index=3, group_index=1, prompt="p", label="l", metadata={"task": "t"})
    first, second = rows_of(rollout(1.0, 2), blank)
    assert (first.prompt, first.label, first.metadata["task"]) == ("p", "l", "t")
    first.metadata["task"] = "other"
    assert (second.metadata["task"], blank.metadata) == ("t", {"task": "t"})


def test_a_sample_that_was_aborted_once_is_trained_when_it_is_played_again() -> None:
    (aborted,) = rows_of(rollout(None), SPANS(index=3, group_index=1))
    (row,) = rows_of(rollout(1.0), aborted)
    assert (row.status, row.reward, row.remove_sample) == (SPANS.Status.COMPLETED, 1.0, False)
    assert sum(row.loss_mask) == 2


def test_a_class_with_postponed_annotations_is_read_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "postponed_types.py").write_text(POSTPONED)
    monkeypatch.syspath_prepend(tmp_path)
    home = importlib.import_module("postponed_types")
    (row,) = rows_of(rollout(1.0), home.Sample(index=0))
    del sys.modules["postponed_types"]
    assert row.weight_versions == ["0"]


@pytest.mark.parametrize("status", [EpisodeStatus.TRUNCATED, EpisodeStatus.TIMED_OUT])
def test_a_graded_rollout_that_ran_into_a_limit_is_truncated(status: EpisodeStatus) -> None:
    [row] = flat(to_samples([rollout(0.5, status=status)], sample_type=SPANS))
    assert (row.status, row.reward) == (SPANS.Status.TRUNCATED, 0.5)


def test_an_interrupted_branch_of_a_graded_rollout_is_truncated_and_not_to_be_generated_again() -> None:
    [row] = flat(to_samples([rollout(0.5, samples=(sample(status="aborted"),))], sample_type=SPANS))
    assert row.status is SPANS.Status.TRUNCATED


# Nothing to train ----------------------------------------------------


@pytest.mark.parametrize("status", [EpisodeStatus.FAILED, EpisodeStatus.CANCELLED, EpisodeStatus.COMPLETED])
def test_a_rollout_without_a_reward_gives_no_row_and_never_reward_zero(status: EpisodeStatus) -> None:
    ungraded = rollout(None if status is EpisodeStatus.COMPLETED else 0.0, number=1, status=status)
    groups = to_samples([rollout(1.0), ungraded, rollout(0.0, number=2)], sample_type=SPANS)
    assert [[row.index for row in flat([group])] for group in groups] == [[0, 2]]
    assert to_samples([ungraded], sample_type=SPANS) == []


@pytest.mark.parametrize("kind", TYPES)
def test_generate_gives_a_removed_aborted_row_for_what_could_not_be_graded(kind: Any) -> None:
    [row] = rows_of(rollout(None, 2), kind(index=1, group_index=0))
    check(row)
    assert (row.status, row.remove_sample, row.reward) == (kind.Status.ABORTED, True, None)
    assert sum(row.loss_mask) == 0


@pytest.mark.parametrize("kind", TYPES)
def test_a_graded_rollout_with_nothing_to_train_still_counts_in_its_baseline(kind: Any) -> None:
    silent = rollout(1.0, samples=(sample(trained=(False,)),), number=1)
    rows = flat(to_samples([rollout(0.0), silent], sample_type=kind))
    check(rows[1])
    assert (sum(rows[1].loss_mask), rows[1].reward, rows[1].remove_sample) == (0, 1.0, True)
    assert post_process_rewards(args(), rows)[1] == [-0.5, 0.5]


def test_an_evaluation_counts_a_rollout_once_and_ungraded_is_not_a_number() -> None:
    blank = SPANS(index=0, group_index=0)
    rows = (sample(kind="subagent", sample_id="a"), sample(trained=(False,), sample_id="b"))
    [row] = rows_of(rollout(1.0, samples=rows), blank, evaluation=True)
    assert (row.metadata["turnstile"]["sample_id"], row.reward, row.response_length) == ("b", 1.0, 2)
    [row] = rows_of(rollout(None), blank, evaluation=True)
    assert math.isnan(row.reward)


def test_with_a_reward_key_the_reward_is_its_components_and_the_whole() -> None:
    graded = rollout(0.5, reward_components={"tests": 1.0, "style": 0.0})
    [row] = rows_of(graded, SPANS(index=0, group_index=0), as_components=True)
    assert row.reward == {"tests": 1.0, "style": 0.0, "reward": 0.5}
    assert row.get_reward_value(args(reward_key="tests")) == 1.0
    assert rows_of(rollout(None), SPANS(), as_components=True)[0].reward is None


def test_without_a_trainer_the_class_must_be_given() -> None:
    with pytest.raises(ImportError, match="sample_type="):
        to_samples([rollout(1.0)])


# Rewards ----------------------------------------------------


@pytest.mark.parametrize("kind", TYPES)
def test_the_baseline_is_that_of_the_rollouts_and_not_of_the_rows(kind: Any) -> None:
    """Two rollouts, one with three rows: by rows the baseline would be 0.75."""
    rows = flat(to_samples(group_of(1.0, 0.0, rows={0: 3}), sample_type=kind))
    assert [row.reward for row in rows] == [1.0, 1.0, 1.0, 0.0]
    assert post_process_rewards(args(), rows) == ([1.0, 1.0, 1.0, 0.0], [0.5, 0.5, 0.5, -0.5])


def test_each_group_has_its_own_baseline_whatever_the_number_of_rows() -> None:
    rollouts = [*group_of(1.0, 0.0, group="a", rows={1: 2}), *group_of(5.0, 3.0, group="b")]
    rows = flat(to_samples(rollouts, sample_type=SPANS))
    assert post_process_rewards(args(), rows)[1] == [0.5, -0.5, -0.5, 1.0, -1.0]


def test_a_row_without_a_reward_is_in_no_baseline_and_leaves_the_logged_mean_alone() -> None:
    rollouts = group_of(1.0, 0.0, None)
    rows = [rows_of(r, SPANS(index=i, group_index=0))[0] for i, r in enumerate(rollouts)]
    assert post_process_rewards(args(), rows) == ([1.0, 0.0, 0.5], [0.5, -0.5, 0.0])


def test_the_standard_deviation_is_over_rollouts_and_safe_for_one() -> None:
    rows = flat(to_samples(group_of(1.0, 0.0, rows={0: 3}), sample_type=SPANS))
    normalised = post_process_rewards(args(grpo_std_normalization=True), rows)[1]
    assert normalised == pytest.approx([0.7071, 0.7071, 0.7071, -0.7071], abs=1e-4)
    rows = flat(to_samples(group_of(1.0), sample_type=SPANS))
    assert post_process_rewards(args(grpo_std_normalization=True), rows)[1] == [0.0]


def test_other_estimators_and_switched_off_normalisation_keep_the_raw_reward() -> None:
    rows = flat(to_samples(group_of(1.0, 0.0), sample_type=SPANS))
    for settings in (args(advantage_estimator="ppo"), args(rewards_normalization=False)):
        assert post_process_rewards(settings, rows) == ([1.0, 0.0], [1.0, 0.0])


def test_rows_of_one_rollout_with_different_rewards_are_refused() -> None:
    rows = flat(to_samples(group_of(1.0, rows={0: 2}), sample_type=SPANS))
    rows[1].reward = 0.5
    with pytest.raises(ValueError, match="different rewards"):
        post_process_rewards(args(), rows)


def test_rows_of_other_sources_are_kept_apart_by_their_own_numbers() -> None:
    rows = [
        SPANS(index=i, group_index=0, reward=r, rollout_id=n)
        for i, (r, n) in enumerate([(1.0, 4), (1.0, 4), (0.0, None)])
    ]
    assert post_process_rewards(args(), rows)[1] == [0.5, 0.5, -0.5]


def test_a_group_is_kept_only_where_graded_rollouts_differ() -> None:
    def groups(*rewards: float | None) -> list[Any]:
        return [rows_of(r, SPANS(index=i, group_index=0)) for i, r in enumerate(group_of(*rewards, rows={0: 2}))]

    assert keep_group(args(), groups(1.0, 0.0, None))
    assert not keep_group(args(), groups(1.0, 1.0, None))
    assert not keep_group(args(), groups(None, None))


@given(
    st.lists(
        st.lists(st.tuples(st.sampled_from([None, 0.0, 0.1, 1.0]), st.integers(1, 3)), min_size=1, max_size=5),
        max_size=4,
    )
)
def test_the_advantages_of_a_group_sum_to_zero_over_its_rollouts(
    shape: list[list[tuple[float | None, int]]],
) -> None:
    rollouts = [
        rollout(reward, rows, group=f"g{g}", number=n)
        for g, group in enumerate(shape)
        for n, (reward, rows) in enumerate(group)
    ]
    groups = to_samples(rollouts, sample_type=SPANS)
    rows = flat(groups)
    advantages = dict(
        zip(map(id, rows), post_process_rewards(args(grpo_std_normalization=True), rows)[1], strict=True)
    )
    for group in groups:
        firsts = [advantages[id(of_rollout[0])] for of_rollout in group]
        assert math.fsum(firsts) == pytest.approx(0.0, abs=1e-9)
        for of_rollout in group:
            assert len({advantages[id(row)] for row in of_rollout}) == 1


# The real class ----------------------------------------------------


@pytest.mark.agents
def test_rows_pass_the_own_checks_of_miles_and_survive_its_files() -> None:
    kind = miles_type()
    recorded = set(RECORDED[1]["fields"]) | {"spec_info", "prefix_cache_info"}
    assert set(kind.__dataclass_fields__) == recorded
    rollouts = [
        *group_of(1.0, 0.0, rows={0: 3}),
        rollout(1.0, number=2, samples=(sample(trained=(True, False, True)),)),
    ]
    for row in flat(to_samples(rollouts, sample_type=kind)) + rows_of(rollout(None), kind(index=9, group_index=0)):
        row.validate()
        check(row)
        assert kind.from_dict(row.to_dict()) == row
        assert row.effective_response_length == sum(row.loss_mask)


# generate ----------------------------------------------------


def test_the_task_is_in_the_metadata_or_is_the_prompt() -> None:
    assert task_in(SPANS(prompt="Add 1 and 2.", metadata={"task": {"id": "sum-1"}})) == {"id": "sum-1"}
    assert task_in(SPANS(prompt="Add 1 and 2.")) == "Add 1 and 2."
    assert task_in(SPANS(prompt=[{"role": "user", "content": "Add."}])) == "Add."
    with pytest.raises(errors.InvalidRequest, match="metadata"):
        task_in(SPANS(prompt=[{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]))


@pytest.mark.anyio
async def test_generate_plays_the_task_of_a_sample_as_the_trainers_call_it(launching_door: Door) -> None:
    async with AsyncClient(launching_door.url, key=launching_door.key) as client:
        generate = Generate(client, agent="tool-loop")
        # How the trainers tell an old-style function, and whether it wants to know about evaluation.
        assert list(inspect.signature(generate).parameters) == ["args", "sample", "sampling_params", "evaluation"]
        asked = {"temperature": 0.7, "top_p": 1.0, "top_k": -1, "max_new_tokens": 8192, "stop": None}
        blank = WITH_ROLLOUT_ID(index=5, group_index=2, metadata={"task": "sum-1"})
        rows = await generate(args(), blank, asked)
        assert rows
        for row in rows:
            check(row)
            assert sum(row.loss_mask) > 0
            assert (row.index, row.group_index, row.rollout_id) == (5, 2, 5)
            assert row.reward in (0.0, 1.0)
        episode = await client.episode(rows[0].metadata["turnstile"]["episode_id"]).status()
        assert episode.sampling.temperature == 0.7
        assert episode.group_id == "group_2"
        assert episode.metadata == {"index": 5, "group_index": 2, "evaluation": False}


@pytest.mark.anyio
async def test_a_greedy_evaluation_gives_one_row_of_what_happened(launching_door: Door) -> None:
    async with AsyncClient(launching_door.url, key=launching_door.key) as client:
        blank = WITH_ROLLOUT_ID(index=0, metadata={"task": "sum-2"})
        [row] = await Generate(client, agent="tool-loop")(args(), blank, {"temperature": 0.0}, evaluation=True)
        check(row)
        assert row.response_length > 1
        assert sum(row.loss_mask) == 0


@pytest.mark.anyio
async def test_an_agent_that_fails_gives_an_aborted_row_and_a_wrong_task_ends_the_run(
    launching_door: Door,
) -> None:
    async def falls(_: object) -> None:
        raise RuntimeError("no")

    async with AsyncClient(launching_door.url, key=launching_door.key) as client:
        generate = Generate(client, agent=falls)
        [row] = await generate(args(), SPANS(index=0, group_index=0, prompt="x y"), {})
        assert (row.status, row.reward, row.remove_sample) == (SPANS.Status.ABORTED, None, True)
        assert row.metadata["turnstile"]["error"] == "agent_failed"
        with pytest.raises(errors.InvalidRequest, match="unknown"):
            await generate(args(), SPANS(index=0, group_index=0, metadata={"task": "unknown"}), {})


@pytest.fixture
def stub() -> Iterator[StubServer]:
    door = StubServer()
    with running_app(door.app()) as door.url:
        yield door


@pytest.mark.anyio
async def test_a_server_away_from_the_start_ends_the_run_and_later_fails_the_rollout(stub: StubServer) -> None:
    quick = ClientSettings(retries=0, poll_s=0.2, outage_s=0.2, backoff_s=0.01, backoff_max_s=0.05)
    async with AsyncClient(stub.url, settings=quick) as client:
        generate = Generate(client, agent="mine", retries=0)
        away = Answer(503, "shutting_down")
        stub.answer = lambda _: away
        with pytest.raises(errors.ServerUnavailable):
            await generate(args(), SPANS(index=0, group_index=0, prompt="one two"), {})
        stub.answer = lambda _: None
        [row] = await generate(args(), SPANS(index=1, group_index=0, prompt="one two"), {})
        assert row.reward == 1.0
        stub.answer = lambda _: away
        [row] = await generate(args(), SPANS(index=2, group_index=0, prompt="one two"), {})
        assert (row.status, row.reward) == (SPANS.Status.ABORTED, None)


@pytest.mark.anyio
async def test_a_cancelled_generate_cancels_its_episode(stub: StubServer) -> None:
    stub.play = lambda _: Play(seconds=60.0)
    async with AsyncClient(stub.url, settings=ClientSettings(poll_s=0.2)) as client:
        generate = Generate(client, agent="mine")
        work = asyncio.create_task(generate(args(), SPANS(index=0, group_index=0, prompt="one two"), {}))
        await wait_until(lambda: stub.open)
        work.cancel()
        with pytest.raises(asyncio.CancelledError):
            await work
        assert [episode.episode_id for episode in stub.episodes] == stub.cancelled
