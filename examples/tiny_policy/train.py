"""Trains the tiny policy from nothing, by supervised learning on synthetic dialogues. 15 minutes on two cores.

    python -m tiny_policy.train OUT [--minutes 12] [--seed 1]     (in examples/)

In the first stage demonstrators are faultless, and the policy learns the tools and to copy. In the second they
have habits (``teacher``), so the policy succeeds sometimes and is unsure at its decisions, which gives
reinforcement learning something to find. Errands are drawn anew for every batch; none of them is held out.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM
from transformers.utils.logging import disable_progress_bar

from tiny_policy.conversation import Conversation
from tiny_policy.evaluate import held_out, play, score
from tiny_policy.network import make_network
from tiny_policy.teacher import FAULTLESS, MIXED, Habits, demonstration
from tiny_policy.tokenizer import make_tokenizer
from tiny_policy.world import offered_tools
from turnstile.models import Tool
from turnstile_server.demo.errands import LEVELS, Errand, errand
from turnstile_server.rendering.factory import create_renderer
from turnstile_server.rendering.protocol import Renderer
from turnstile_server.settings import RenderingSettings

BATCH = 8
BUCKET = 8
"""Batches drawn together and sorted by length, so that little is padded."""
PAD_TO = 32
"""Few shapes: bfloat16 kernels are chosen anew for each."""
RATE = 4e-3
EMBEDDING_RATE = 2.4e-3
DECAY = 0.05
WARM_UP = 0.03
CLIP = 1.0
SECOND_STAGE = 0.6
"""Share of the time after which demonstrators have habits."""


@dataclass(frozen=True, slots=True)
class Batch:
    """``ids`` int64 [rows, T], padded on the right; ``mask`` float32 [rows, T]: 1 where the policy speaks."""

    ids: Tensor
    mask: Tensor


class Demonstrations:
    """Batches without end."""

    def __init__(self, renderer: Renderer, tokenizer: PreTrainedTokenizerFast, seed: int) -> None:
        self._renderer = renderer
        self._tokenizer = tokenizer
        self._end = int(tokenizer.eos_token_id)
        self._tools: tuple[Tool, ...] = offered_tools()
        self._draw = random.Random(seed)

    def batches(self, habits: Habits) -> Iterator[Batch]:
        """The next few, of one length each."""
        drawn = sorted((self._one(habits) for _ in range(BATCH * BUCKET)), key=lambda row: len(row.ids))
        chunks = [drawn[start : start + BATCH] for start in range(0, len(drawn), BATCH)]
        self._draw.shuffle(chunks)
        for chunk in chunks:
            length = -(-max(len(row.ids) for row in chunk) // PAD_TO) * PAD_TO
            ids = torch.zeros(len(chunk), length, dtype=torch.int64)
            mask = torch.zeros(len(chunk), length)
            for row, conversation in enumerate(chunk):
                ids[row, : len(conversation.ids)] = torch.tensor(conversation.ids)
                mask[row, : len(conversation.ids)] = torch.tensor(conversation.mask)
            yield Batch(ids, mask)

    def _one(self, habits: Habits) -> Conversation[Errand]:
        task = errand(self._draw, self._draw.choice(LEVELS))
        conversation = Conversation(self._renderer, self._tools, task)
        conversation.follow(
            [*self._tokenizer.encode(text, add_special_tokens=False), self._end]
            for text in demonstration(task, habits, self._draw)
        )
        return conversation


def computes_in_bfloat16() -> bool:
    """Whether this processor has instructions for bfloat16. Without them float32 is four times as fast."""
    return any(held for name, held in torch.cpu.get_capabilities().items() if name.endswith("bf16"))


def loss_of(network: Qwen3ForCausalLM, batch: Batch) -> Tensor:
    """Mean cross-entropy, in nats, over what the policy said. Rows are padded behind their end, which a causal
    network cannot see: no attention mask is needed."""
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=computes_in_bfloat16()):
        logits = network(input_ids=batch.ids, use_cache=False).logits[:, :-1]
    chosen = batch.mask[:, 1:].bool()
    return torch.nn.functional.cross_entropy(logits[chosen].float(), batch.ids[:, 1:][chosen])


def train(network: Qwen3ForCausalLM, demonstrations: Demonstrations, done_after: Callable[[int], float]) -> None:
    """Train ``network`` in place until ``done_after(steps)`` is 1.

    It is the share of the training that is done, by steps or by time. Learning rates and stages follow it.
    """
    matrices = [p for name, p in network.named_parameters() if p.ndim == 2 and "embed" not in name]
    rest = [p for name, p in network.named_parameters() if p.ndim != 2 or "embed" in name]
    muon = torch.optim.Muon(matrices, lr=RATE, weight_decay=DECAY, adjust_lr_fn="match_rms_adamw")
    adam = torch.optim.AdamW(rest, lr=EMBEDDING_RATE, weight_decay=0.0, betas=(0.9, 0.95))
    started = shown = time.monotonic()
    losses: list[float] = []
    steps = tokens = 0
    network.train()
    while (done := done_after(steps)) < 1:
        for batch in demonstrations.batches(FAULTLESS if done < SECOND_STAGE else MIXED):
            done = done_after(steps)
            share = max(0.02, min(1.0, done / WARM_UP, (1 - done) / (1 - WARM_UP)))
            for optimizer, rate in ((muon, RATE), (adam, EMBEDDING_RATE)):
                for group in optimizer.param_groups:
                    group["lr"] = rate * share
            loss = loss_of(network, batch)
            loss.backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_(network.parameters(), CLIP)
            muon.step()  # type: ignore[no-untyped-call]
            adam.step()
            network.zero_grad()
            losses.append(float(loss.detach()))
            steps += 1
            tokens += batch.ids.numel()
        if time.monotonic() - shown > 15:
            shown = time.monotonic()
            recent = losses[-100:]
            print(
                f"{shown - started:5.0f} s  {steps:5d} steps  {tokens / 1e6:5.2f} M tokens  "
                f"loss {sum(recent) / len(recent):.4f}",
                flush=True,
            )


def main() -> int:
    parser = argparse.ArgumentParser(description="Trains the tiny policy from nothing.")
    parser.add_argument("out", type=Path)
    parser.add_argument("--minutes", type=float, default=12.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--episodes", type=int, default=600, help="held-out episodes to judge it by at the end")
    arguments = parser.parse_args()
    disable_progress_bar()  # type: ignore[no-untyped-call]
    lines = (f"{tool.name} {' '.join(tool.parameters['required'])}\n" for tool in offered_tools())
    tokenizer = make_tokenizer("".join(lines))
    network = make_network(tokenizer, arguments.seed)
    tokenizer.save_pretrained(arguments.out)
    network.save_pretrained(arguments.out)
    renderer = create_renderer(arguments.out, RenderingSettings())
    size = sum(parameter.numel() for parameter in network.parameters())
    print(f"{len(tokenizer)} tokens, {size:,} parameters, seed {arguments.seed}", flush=True)
    started = time.monotonic()
    train(
        network,
        Demonstrations(renderer, tokenizer, arguments.seed),
        lambda _: (time.monotonic() - started) / (arguments.minutes * 60),
    )
    network.save_pretrained(arguments.out)
    print(score(play(arguments.out, held_out(arguments.episodes, seed=7), seed=7)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
