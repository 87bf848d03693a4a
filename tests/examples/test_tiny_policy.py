"""The tiny policy: its errands are fair, what is played in memory is what is played in earnest, it solves some."""

from __future__ import annotations

import asyncio
import itertools
import random
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from local import TURNSTILE
from sglang_server import sglang_server
from tiny_policy.conversation import Conversation
from tiny_policy.evaluate import held_out, play, score
from tiny_policy.network import make_network
from tiny_policy.teacher import FAULTLESS, MIXED, demonstration
from tiny_policy.train import Demonstrations, loss_of, train
from tiny_policy.world import World, offered_tools
from turnstile import AsyncClient, Rollout
from turnstile.models import Message, Sample, ToolCall
from turnstile_server.demo import TINY
from turnstile_server.demo.checks import TOLERANCE, audit
from turnstile_server.demo.errands import LEVELS, Errand, errands
from turnstile_server.demo.local_server import serve
from turnstile_server.rendering.factory import create_renderer
from turnstile_server.rendering.protocol import Renderer
from turnstile_server.settings import RenderingSettings
from turnstile_server.tasks.model import Task

pytestmark = pytest.mark.slow

LIMITS = {"max_turns": 10, "max_completion_tokens": 96}
MOST_BYTES = 12 << 20


@pytest.fixture(scope="module")
def renderer() -> Renderer:
    return create_renderer(TINY, RenderingSettings())


def first(count: int, *, seed: int = 3, held: bool = False) -> list[Errand]:
    return list(itertools.islice(errands(seed, held_out=held), count))


# The family


def words(errand: Errand) -> set[str]:
    return {*errand.notes, errand.target, *itertools.chain.from_iterable(errand.lines)}


def test_held_out_errands_share_no_word_and_no_code_with_others() -> None:
    seen = set().union(*(words(errand) for errand in first(2000)))
    unseen = set().union(*(words(errand) for errand in first(500, held=True)))
    assert len(unseen) > 500
    assert not seen & unseen


def test_equal_seeds_give_equal_errands_and_levels_grow_longer() -> None:
    assert first(40) == first(40)
    assert first(40) != first(40, seed=4)
    assert [errand.level for errand in first(4)] == list(LEVELS)
    assert [(len(errand.notes), len(errand.lines)) for errand in first(4)] == [(1, 1), (2, 2), (3, 3), (4, 4)]


def test_an_errand_is_a_task_that_a_faultless_demonstrator_solves_and_nothing_else_does() -> None:
    for errand in first(20):
        Task.model_validate({"id": "one", **errand.task()})
        world = World(errand.files)
        assert not errand.done(world.files)
        world.call(ToolCall("write_file", f'{{"path": "{errand.target}.txt", "content": "0000"}}'))
        assert not errand.done(world.files)
        world.call(ToolCall("write_file", f'{{"path": "{errand.target}.txt", "content": "{errand.code}"}}'))
        assert errand.done(world.files)


@pytest.mark.thorough
def test_errands_as_a_file_are_sound_tasks(tmp_path: Path) -> None:
    """The hidden tests in real sandboxes: the known solution scores 1, doing nothing does not."""
    file = tmp_path / "errands.jsonl"
    command = [sys.executable, "-m", "turnstile_server.demo.errands", "4", "--held-out"]
    file.write_bytes(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
    validate = [TURNSTILE, "tasks", "validate", str(file), "--sandbox", "local"]
    done = subprocess.run(validate, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "errand-4-level-4" in done.stdout


def test_habits_make_a_demonstrator_fail_often_and_the_faultless_never(renderer: Renderer) -> None:
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    draw = random.Random(0)

    def rate(habits: object) -> float:
        rewards = []
        for errand in first(200):
            conversation = Conversation(renderer, offered_tools(), errand)
            replies = demonstration(errand, habits, draw)  # type: ignore[arg-type]
            conversation.follow([*tokenizer.encode(text), tokenizer.eos_token_id] for text in replies)
            rewards.append(conversation.reward)
        return sum(rewards) / len(rewards)

    assert rate(FAULTLESS) == 1.0
    assert 0.3 < rate(MIXED) < 0.7


# The policy


@pytest.mark.thorough
def test_the_checkpoint_is_small_and_solves_some_held_out_errands_but_not_all() -> None:
    assert sum(path.stat().st_size for path in TINY.iterdir()) < MOST_BYTES
    found = score(play(TINY, held_out(160, seed=31), seed=31))
    assert "torch" not in [thread.name for thread in threading.enumerate()]  # the engine's
    assert 0.25 < found.rate < 0.75, found


def test_a_new_network_copies_before_it_has_learned_anything() -> None:
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    network = make_network(tokenizer, seed=5)
    half = torch.randint(0, len(tokenizer), (8, 100), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        logits = network(input_ids=torch.cat([half, half], 1)).logits
    right = logits[:, 100:-1].argmax(-1) == half[:, 1:]
    assert float(right.float().mean()) > 0.5


@pytest.mark.thorough
def test_training_lowers_the_loss_on_demonstrations_that_it_has_not_seen(renderer: Renderer) -> None:
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    network = make_network(tokenizer, seed=5)
    (unseen, *_) = Demonstrations(renderer, tokenizer, seed=99).batches(FAULTLESS)
    before = float(loss_of(network, unseen).detach())
    train(network, Demonstrations(renderer, tokenizer, seed=1), lambda steps: steps / 16)
    assert float(loss_of(network, unseen).detach()) < before / 2


# In earnest


async def played_on(folder: Path, engine_url: str | None = None) -> list[Rollout]:
    """A few errands through a real server, with a real agent process in a sandbox, each audited."""
    options = ["--sandbox", "local"]
    async with (
        serve(TINY, folder / "data", engine_url=engine_url, options=options) as server,
        AsyncClient(server.control_url, key=server.control_key) as client,
    ):
        tasks = [errand.task() for errand in first(8, held=True)]
        options_of = {"agent": "plain-loop", "max_concurrent": 4, "limits": LIMITS}
        found = [rollout async for rollout in client.rollouts(tasks, **options_of)]
        reports = await audit(client)
    for rollout in found:
        assert rollout.error is None, rollout.error
        assert rollout.episode is not None
        report = reports[rollout.episode.episode_id]
        assert max(turn.max_abs_delta or 0.0 for turn in report.turns) < TOLERANCE
    return found


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> list[Rollout]:
    return asyncio.run(played_on(tmp_path_factory.mktemp("played")))


def sample_of(rollout: Rollout) -> Sample:
    assert rollout.samples is not None
    (sample,) = rollout.samples.samples
    return sample


def errand_of(rollout: Rollout) -> Errand:
    instruction = rollout.task.instruction
    return next(errand for errand in first(8, held=True) if errand.instruction == instruction)


def same_in_memory(rollout: Rollout, renderer: Renderer) -> int | None:
    """The real completions, played in memory: every id, the mask and the reward are equal. Gives the turns, None
    where the policy made a call that only the real tools can answer."""
    sample = sample_of(rollout)
    conversation = Conversation(renderer, offered_tools(), errand_of(rollout))
    conversation.follow(sample.input_ids[span.start : span.end].tolist() for span in sample.turn_spans)
    if not conversation.exact:
        return None
    assert conversation.ids[: len(sample.input_ids)] == sample.input_ids.tolist()
    assert conversation.mask[: len(sample.input_ids)] == sample.loss_mask.tolist()
    assert conversation.reward == rollout.reward
    return conversation.turns


def all_same_in_memory(rollouts: list[Rollout], renderer: Renderer) -> list[int]:
    """The turns of each rollout that can be compared, which are at least half of them."""
    turns = [turns for rollout in rollouts if (turns := same_in_memory(rollout, renderer)) is not None]
    assert len(turns) >= len(rollouts) // 2
    return turns


@pytest.mark.thorough
def test_an_episode_in_memory_is_the_real_one_token_for_token(played: list[Rollout], renderer: Renderer) -> None:
    turns = all_same_in_memory(played, renderer)
    assert max(turns) > 2


@pytest.mark.thorough
def test_rendering_the_history_again_would_give_other_tokens(played: list[Rollout], renderer: Renderer) -> None:
    """What makes the policy a good example: thinking is dropped from earlier turns, as in templates in use."""
    several = [rollout for rollout in played if len(sample_of(rollout).turn_spans) > 1]
    assert several
    for rollout in several:
        ids, start = sample_of(rollout).input_ids, sample_of(rollout).turn_spans[0]
        parser = renderer.parser(offered_tools(), prompt_tail=ids[: start.start])
        parser.feed(ids[start.start : start.end])
        reply = parser.finish()[1].message
        assert reply.reasoning
        history = [Message("user", errand_of(rollout).instruction), reply, Message("tool", "x")]
        again = renderer.render(history, offered_tools()).ids
        assert not np.array_equal(again[: start.end], ids[: start.end])


@pytest.mark.sglang
@pytest.mark.thorough
@pytest.mark.timeout(400)
def test_sglang_serves_it_too(tmp_path: Path, renderer: Renderer) -> None:
    with sglang_server(TINY) as url:
        found = asyncio.run(played_on(tmp_path, url))
    assert min(all_same_in_memory(found, renderer)) > 0
