"""Compares the token forest with the flat samples: tokens and bytes of the same episodes.

    python benchmarks/tree.py

The episodes have four shapes, with turns of the lengths below; ratios are flat to forest. *Tokens* are those that
a trainer feeds its model. *Bytes* are those of ``GET /samples`` and ``GET /tree`` as safetensors, plain and behind
gzip, which finds repeats only within 32 KiB. Nothing is timed. The rows that the forest gives back are compared
with the flat ones each time.
"""

from __future__ import annotations

import gzip
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from turnstile.models import EpisodeStatus, Message, SamplingUsed, Turn, TurnTimings, WeightSpan
from turnstile.models.samples_encoding import encode_forest, encode_samples
from turnstile_server.capture import EpisodeFacts, Node, TokenTree, export_forest, export_samples

SYSTEM = 2_000
"""Tokens of the first call: system prompt, tools, task."""
RESULT = 600
"""Tokens of a tool result, as each later call adds it."""
REPLY = 150
"""Sampled tokens of a turn."""
FACTS = EpisodeFacts(episode_id="ep_1", rollout_id="ep_1", status=EpisodeStatus.COMPLETED, reward=1.0)


class Growing:
    """An episode that is made turn by turn; token ids are random, as those of a real vocabulary nearly are."""

    def __init__(self) -> None:
        self.tree = TokenTree()
        self._random = np.random.default_rng(0)

    def turn(self, parent: Node | None, context: int, *, tools: str = "main", asked: str = "") -> Node:
        seq = len(self.tree)
        turn = Turn(
            turn_id=f"turn_{seq:032x}",
            episode_id="ep_1",
            parent_id=parent.turn.turn_id if parent is not None else None,
            seq=seq,
            dialect="chat",
            context_ids=self._random.integers(0, 150_000, context, np.int32),
            completion_ids=self._random.integers(0, 150_000, REPLY, np.int32),
            logprobs=-self._random.exponential(0.5, REPLY).astype(np.float32),
            weight_spans=(WeightSpan(start=0, end=REPLY, version="w1"),),
            finish_reason="stop",
            sampling=SamplingUsed(max_new_tokens=1024),
            template_hash="t",
            tools_key=tools,
            request_key=asked or f"request {seq}",
            new_messages=(Message("user" if parent is None else "tool", f"{seq}"),),
            reply=Message("assistant", f"{seq}"),
            timings=TurnTimings(started_at=float(seq)),
        )
        node = self.tree.add(turn)
        node.record_delivery("written")  # what an agent never got is not exported
        return node

    def line(self, parent: Node | None, turns: int, *, tools: str = "main") -> Node:
        for _ in range(turns):
            parent = self.turn(parent, RESULT if parent is not None else SYSTEM, tools=tools)
        assert parent is not None
        return parent


@dataclass(frozen=True)
class Shape:
    name: str
    tree: TokenTree


def shapes() -> Iterator[Shape]:
    yield Shape("linear, 40 turns", linear())
    yield Shape("compacted twice, 3 × 20 turns, 3,000 tokens carried over", compacted())
    yield Shape("retries: every 8th of 40 calls answered twice, the first reply dropped", retried(go_on=False))
    yield Shape("retries: the same, both replies followed for 2 turns", retried(go_on=True))
    yield Shape("sub-agents: 20 turns, 4 sub-agents of 8 turns each", sub_agents())
    yield Shape("4 ways on after turn 10 of 20", best_of(4, at=10, turns=20))
    yield Shape("8 ways on after turn 10 of 20", best_of(8, at=10, turns=20))
    yield Shape("8 ways on after turn 30 of 40", best_of(8, at=30, turns=40))
    yield Shape("16 answers to the call after 40 turns", best_of(16, at=40, turns=41))


def linear() -> TokenTree:
    episode = Growing()
    episode.line(None, 40)
    return episode.tree


def compacted() -> TokenTree:
    """Each time the agent starts over with a summary: roots of their own, nothing shared."""
    episode = Growing()
    episode.line(None, 20)
    for _ in range(2):
        episode.line(episode.turn(None, SYSTEM + 3_000), 19)
    return episode.tree


def retried(*, go_on: bool) -> TokenTree:
    episode = Growing()
    last = episode.turn(None, SYSTEM)
    for number in range(1, 40):
        if number % 8 == 0:
            dropped = episode.turn(last, RESULT, asked=f"call {number}")
            if go_on:
                episode.line(dropped, 2)
            last = episode.turn(last, RESULT, asked=f"call {number}")
        else:
            last = episode.turn(last, RESULT)
    return episode.tree


def sub_agents() -> TokenTree:
    episode = Growing()
    last = episode.line(None, 4)
    for _ in range(4):
        episode.line(None, 8, tools="sub")
        last = episode.line(last, 4)
    return episode.tree


def best_of(ways: int, *, at: int, turns: int) -> TokenTree:
    episode = Growing()
    stem = episode.line(None, at)
    for _ in range(ways):
        episode.line(stem, turns - at)
    return episode.tree


def row(shape: Shape) -> str:
    flat, forest = export_samples(shape.tree, FACTS), export_forest(shape.tree, FACTS)
    wire, tree_wire = encode_samples(flat), encode_forest(forest)
    if encode_samples(forest.to_samples()) != wire:
        raise SystemExit(f"{shape.name}: the forest does not give the flat samples back")
    tokens, once = sum(len(sample.input_ids) for sample in flat.samples), len(forest.input_ids)
    packed = len(gzip.compress(wire, 6)) / len(gzip.compress(tree_wire, 6))
    return (
        f"| {shape.name} | {len(flat.samples)} | {tokens:,} | {once:,} | {tokens / once:.2f} "
        f"| {len(wire) / len(tree_wire):.2f} | {packed:.2f} |"
    )


def main() -> None:
    print(f"First call {SYSTEM:,} tokens, tool results {RESULT}, replies {REPLY}.\n")
    print("| episode | rows | tokens, flat | tokens, forest | ratio | bytes | bytes behind gzip |")
    print("|---|---:|---:|---:|---:|---:|---:|")
    for shape in shapes():
        print(row(shape))


if __name__ == "__main__":
    main()
