"""The same dialogues on a real SGLang and on a real vLLM that serve one model: equal trees, true logprobs on both.

A scripted agent (``scripted_dialogues``) plays them over the gate. What it sends back is what it got, so at
temperature 0 every token is the same on both engines, and at temperature 1 the sampled ones differ while the tree
keeps its shape. The judge of the logprobs is an independent forward pass.

It needs both engines, and is marked `vllm` alone so that CI, which runs either mark, plays it once.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import anthropic
import numpy as np
import openai
import pytest
import torch
from engines_support import TOLERANCE, VLLM_TOLERANCE, reference_logprobs, tokenizer
from scripted_dialogues import SHAPES, AnthropicAgent, ChatAgent, Dialogue, play_anthropic, play_chat
from transformers import AutoModelForCausalLM

from sglang_server import sglang_server
from turnstile import AsyncClient
from turnstile.models import Episode, Int32Array, TokenForest, Turn
from turnstile_server.demo import TINY
from turnstile_server.demo.local_server import serve
from vllm_server import TIMEOUT_S, vllm_server

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(TIMEOUT_S)]

TOLERANCES = {"sglang": TOLERANCE, "vllm": VLLM_TOLERANCE}
TEMPERATURES = (0.0, 1.0)


@dataclass(frozen=True)
class Played:
    """One episode, as its agent saw it and as it was recorded."""

    dialogue: Dialogue
    episode: Episode
    turns: tuple[Turn, ...]
    tree: TokenForest

    def shape(self) -> list[tuple[int | None, str | None]]:
        """Of each turn: its parent, and why it broke with the tokens before."""
        numbers = {turn.turn_id: number for number, turn in enumerate(self.turns)}
        return [
            (
                numbers[turn.parent_id] if turn.parent_id is not None else None,
                turn.break_.reason.value if turn.break_ is not None else None,
            )
            for turn in self.turns
        ]

    def paths(self) -> list[tuple[Int32Array, int]]:
        """Of each turn: all ids up to its end, and where its completion starts."""
        found: dict[str, Int32Array] = {}
        whole = []
        for turn in self.turns:
            before = found[turn.parent_id] if turn.parent_id is not None else np.empty(0, np.int32)
            found[turn.turn_id] = np.concatenate([before, turn.context_ids, turn.completion_ids])
            whole.append((found[turn.turn_id], len(before) + len(turn.context_ids)))
        return whole


AllPlayed = dict[str, dict[float, list[Played]]]
"""By engine and temperature: the dialogues of ``SHAPES``."""


async def play(client: AsyncClient, temperature: float) -> list[Played]:
    """Every dialogue, each in an episode of its own."""
    return [await play_one(client, temperature, dialect) for dialect in ("chat", "anthropic")]


async def play_one(client: AsyncClient, temperature: float, dialect: str) -> Played:
    handle = await client.create_episode("Play a dialogue.", sampling={"temperature": temperature})
    async with handle as episode:
        dialogue = Dialogue()
        if dialect == "chat":
            url = f"{episode.model_url}/v1"
            async with openai.AsyncOpenAI(base_url=url, api_key=episode.episode_key, max_retries=0) as chat:
                await play_chat(ChatAgent(chat, dialogue))
        else:
            url = episode.model_url
            async with anthropic.AsyncAnthropic(base_url=url, api_key=episode.episode_key, max_retries=0) as other:
                await play_anthropic(AnthropicAgent(other, dialogue))
        ended = await episode.finish()
        return Played(dialogue, ended, await episode.turns(), await episode.tree(include_untrained=True))


async def play_on(kind: str, url: str, folder: Path) -> dict[float, list[Played]]:
    async with (
        serve(TINY, folder / "data", engine=kind, engine_url=url, options=["--sandbox", "none"]) as server,
        AsyncClient(server.control_url, key=server.control_key) as client,
    ):
        return {temperature: await play(client, temperature) for temperature in (0.0, 1.0)}


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> AllPlayed:
    """By engine and temperature. Both engines start at once, and are gone when the tests compare."""
    with ExitStack() as engines, ThreadPoolExecutor(2) as pool:
        urls = {
            "sglang": pool.submit(engines.enter_context, sglang_server(TINY)),
            "vllm": pool.submit(engines.enter_context, vllm_server(TINY)),
        }
        return {
            kind: asyncio.run(play_on(kind, url.result(), tmp_path_factory.mktemp(kind)))
            for kind, url in urls.items()
        }


@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize("kind", TOLERANCES)
def test_the_tree_has_the_shape_that_the_agent_gave_it(played: AllPlayed, kind: str, temperature: float) -> None:
    for one, expected in zip(played[kind][temperature], SHAPES, strict=True):
        assert one.shape() == list(expected)
        roots = [parent for parent, _ in expected].count(None)
        stats = one.episode.stats
        assert (stats.turns, stats.roots) == (len(expected), roots)
        assert stats.breaks == Counter(reason for _, reason in expected if reason is not None)
        assert stats.sampled_tokens == sum(len(turn.completion_ids) for turn in one.turns)
        assert stats.discarded == {}
        for turn, most in zip(one.turns, one.dialogue.most, strict=True):
            assert len(turn.completion_ids) <= most
            assert turn.finish_reason == "stop" or len(turn.completion_ids) == most
            assert [span.version for span in turn.weight_spans] == ["default"]
            if turn.stop_string is not None:
                texts = [tokenizer(TINY).decode(ids) for ids in (turn.completion_ids, turn.completion_ids[:-1])]
                assert [turn.stop_string in text for text in texts] == [True, False]


@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_the_trees_on_both_engines_are_equal_in_shape(played: AllPlayed, temperature: float) -> None:
    for ours, theirs in pairs(played, temperature):
        assert ours.tree.parents.tolist() == theirs.tree.parents.tolist()
        rows = [[(row.node, row.kind) for row in one.tree.rows] for one in (ours, theirs)]
        assert rows[0] == rows[1]
        assert ours.dialogue.carried == theirs.dialogue.carried
        assert ours.episode.stats.branches == theirs.episode.stats.branches
        for one in (ours, theirs):
            assert [turn.turn_id for turn in one.turns] == list(one.tree.turn_ids)


def test_at_temperature_0_both_engines_sample_the_same_tokens(played: AllPlayed) -> None:
    """Beside each token that is sampled, no other is as likely: what differs is no tie that rounding decides."""
    for ours, theirs in pairs(played, 0.0):
        for (ids, start), turn in zip(ours.paths(), ours.turns, strict=True):
            chosen, margin = greedy(ids, start)
            assert chosen.tolist() == turn.completion_ids.tolist()
            assert margin > 2 * VLLM_TOLERANCE
        for one, other in zip(ours.turns, theirs.turns, strict=True):
            assert one.context_ids.tolist() == other.context_ids.tolist()
            assert one.completion_ids.tolist() == other.completion_ids.tolist()
            assert (one.finish_reason, one.stop_string) == (other.finish_reason, other.stop_string)
            assert (one.reply.content, one.parse_status) == (other.reply.content, other.parse_status)
        assert ours.dialogue.finishes == theirs.dialogue.finishes
        assert ours.tree.input_ids.tolist() == theirs.tree.input_ids.tolist()
        assert {"stop", "length"} == {turn.finish_reason for turn in ours.turns}
        assert any(turn.stop_string is not None for turn in ours.turns)
        assert any(turn.reply.tool_calls for turn in ours.turns)


def test_at_temperature_1_contexts_are_equal_where_the_replies_in_them_are(played: AllPlayed) -> None:
    compared = differ = 0
    for ours, theirs in pairs(played, 1.0):
        same = [
            one.completion_ids.tolist() == other.completion_ids.tolist()
            for one, other in zip(ours.turns, theirs.turns, strict=True)
        ]
        differ += same.count(False)
        for one, other, carried in zip(ours.turns, theirs.turns, ours.dialogue.carried, strict=True):
            if all(same[number] for number in carried):
                compared += 1
                assert one.context_ids.tolist() == other.context_ids.tolist()
    assert compared >= sum([parent for parent, _ in shape].count(None) for shape in SHAPES) - 1
    assert differ > 0, "sampled, and yet all equal"


@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize("kind", TOLERANCES)
def test_logprobs_are_those_of_an_independent_forward(played: AllPlayed, kind: str, temperature: float) -> None:
    gaps = []
    for one in played[kind][temperature]:
        for (ids, start), turn in zip(one.paths(), one.turns, strict=True):
            expected = reference_logprobs(TINY, ids, start, temperature)
            gaps.append(float(np.abs(expected - turn.logprobs).max()))
    assert 0 < max(gaps) < TOLERANCES[kind]


def pairs(played: AllPlayed, temperature: float) -> Iterator[tuple[Played, Played]]:
    return zip(played["sglang"][temperature], played["vllm"][temperature], strict=True)


def greedy(ids: Int32Array, start: int) -> tuple[Int32Array, float]:
    """The likeliest token at each place from ``start`` on, and the least lead of one on the next best, in nats."""
    with torch.inference_mode():
        logits = network()(input_ids=torch.tensor([ids.tolist()])).logits[0, start - 1 : -1]
        best = logits.topk(2, dim=-1)
    return best.indices[:, 0].numpy().astype(np.int32), float((best.values[:, 0] - best.values[:, 1]).min())


@cache
def network() -> Any:
    return AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32).eval()
