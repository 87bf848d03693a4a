"""The chores of a real small model: fair tasks, demonstrators with habits, the ablation's arms and pieces."""

from __future__ import annotations

import asyncio
import itertools
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

from chores.arms import Transcript, rows_of_arm, runs
from chores.chores import HABITS, KINDS, Chore, chores
from chores.pieces import Checkpoint
from chores.run import distance_of
from chores.start import demonstrated
from grpo.learner import GrpoSettings
from tiny_policy.world import offered_tools
from turnstile import AsyncClient
from turnstile.models import Sample, TurnFacts
from turnstile_server.demo import TINY
from turnstile_server.demo.errands import errands
from turnstile_server.demo.local_server import serve
from turnstile_server.demo.real_model import TOOLS_TEMPLATE
from turnstile_server.rendering.factory import create_renderer
from turnstile_server.settings import RenderingSettings
from turnstile_server.tasks.model import Task

CARE = dict.fromkeys(KINDS, 0.0)


def first(count: int, *, seed: int = 3, held: bool = False) -> list[Chore]:
    return list(itertools.islice(chores(seed, held_out=held), count))


def test_equal_seeds_give_equal_chores_of_all_kinds_and_held_out_things_are_others() -> None:
    assert first(40) == first(40) != first(40, seed=4)
    assert {task.kind for task in first(4)} == set(KINDS)
    known, unknown = ({task.about for task in first(2000, held=held)} for held in (False, True))
    assert len(unknown) > 10
    assert not known & unknown


def test_care_solves_every_chore_and_habits_fail_about_half() -> None:
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    renderer = create_renderer(TINY, RenderingSettings())
    draw = random.Random(0)
    rates = []
    for habits in (CARE, HABITS):
        found = [demonstrated(renderer, tokenizer, task, draw, habits) for task in first(80)]
        rates.append(sum(each.reward for each in found) / len(found))
    assert rates[0] == 1.0
    assert 0.35 < rates[1] < 0.75


def test_a_chore_is_a_task() -> None:
    for task in first(8):
        Task.model_validate({"id": "one", **task.task()})
        assert not task.done(task.files)


# The arms


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    found: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(TINY)
    found.chat_template = TOOLS_TEMPLATE.read_text()
    return found


async def _played(folder: Path) -> tuple[list[Sample], list[TurnFacts]]:
    """An episode of several turns with thoughts, by the tiny policy."""
    async with (
        serve(TINY, folder / "data", options=["--sandbox", "local"]) as server,
        AsyncClient(server.control_url, key=server.control_key) as client,
    ):
        tasks = [errand.task() for errand in itertools.islice(errands(5, (2,), held_out=True), 4)]
        async for rollout in client.rollouts(tasks, agent="plain-loop", limits={"max_turns": 8}):
            assert rollout.samples is not None
            assert rollout.episode is not None
            if rollout.samples.stats.turns > 2 and not rollout.samples.untrained:
                turns = await client.episode(rollout.episode.episode_id).turns()
                return list(rollout.samples.samples), list(turns)
    raise AssertionError("no episode of several turns")


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Sample], list[TurnFacts]]:
    return asyncio.run(_played(tmp_path_factory.mktemp("chores")))


def sampled(rows: list[Sample]) -> list[list[int]]:
    return [row.input_ids[start:end].tolist() for row in rows for start, end in runs(row.loss_mask)]


@pytest.mark.slow
def test_the_arms_train_the_same_replies_and_differ_as_they_say(
    played: tuple[list[Sample], list[TurnFacts]], tokenizer: PreTrainedTokenizerBase
) -> None:
    samples, turns = played
    transcript = Transcript(turns, [dict(tool.spec) for tool in offered_tools()])
    made = {arm: rows_of_arm(arm, samples, transcript, tokenizer) for arm in ("exact", "retokenized", "per_call")}
    exact = sampled(made["exact"])
    assert len(exact) == len(turns)
    assert sampled(made["per_call"]) == exact
    assert len(made["per_call"]) == len(turns)
    assert all(len(runs(row.loss_mask)) == 1 for row in made["per_call"])
    # Characters are the tiny policy's tokens, so nothing drifts where all thoughts are kept.
    assert sampled(made["retokenized"]) == exact
    stock = sampled(rows_of_arm("stock", samples, transcript, tokenizer))
    said = [tokenizer.decode(ids) for ids in stock]
    assert ["<think>" in text for text in said] == [False] * (len(turns) - 1) + [True]


def test_the_distance_of_other_tokens_is_counted_by_reply() -> None:
    def row(ids: list[int], mask: list[int], logprobs: list[float]) -> Sample:
        return Sample(
            sample_id="s",
            input_ids=np.asarray(ids, np.int32),
            loss_mask=np.asarray(mask, np.uint8),
            logprobs=np.asarray(logprobs, np.float32),
            weight_version=np.where(mask, 0, -1).astype(np.int32),
            weight_version_names=("0",),
            turn_spans=(),
            kind="main",
            episode_id="e",
            rollout_id="r",
            finish_reason="stop",
            status="completed",
        )

    recorded = row([1, 2, 3, 4, 5], [0, 1, 1, 0, 1], [0, -1, -1, 0, -2])
    others = row([1, 6, 4, 5], [0, 1, 0, 1], [0, -5, 0, -2])
    found = distance_of([([recorded], [others])], GrpoSettings())
    assert (found.replies, found.other_ids, found.outside) == (2, 0.5, 0.5)
    assert found.gap == pytest.approx(1.0)
    assert found.kl == pytest.approx(1.0)


# The pieces


@pytest.mark.slow
def test_a_checkpoint_is_the_old_state_or_the_new_one_and_goes_on_where_it_was(tmp_path: Path) -> None:
    def make(folder: Path) -> None:
        AutoModelForCausalLM.from_pretrained(TINY).save_pretrained(folder)

    checkpoint = Checkpoint.opened(tmp_path / "run", make)
    network = AutoModelForCausalLM.from_pretrained(checkpoint.folder, dtype=torch.float32)
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-3)
    for parameter in network.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    checkpoint.steps = 1
    checkpoint.save(network, optimizer)
    # Killed between the two renames of a save: the old state is beside.
    (tmp_path / "run").rename(tmp_path / "run.old")

    again = Checkpoint.opened(tmp_path / "run", make)
    assert again.steps == 1
    loaded = AutoModelForCausalLM.from_pretrained(again.folder, dtype=torch.float32)
    fresh = torch.optim.AdamW(loaded.parameters(), lr=1e-3)
    again.load_optimizer(fresh)
    for a, b in zip(network.parameters(), loaded.parameters(), strict=True):
        assert torch.equal(a, b)
    kept, read = (each.state_dict()["state"][0]["exp_avg"] for each in (optimizer, fresh))
    assert torch.equal(kept, read)
