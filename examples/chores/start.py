"""A short supervised start: SmolLM2-135M-Instruct learns the tools from demonstrators with bad habits.

    python -m chores.start MODEL OUT [--steps 40] [--minutes 9]        (in examples/)

MODEL is what scripts/real_model.py makes. OUT becomes a model folder with the chat template of this one, which
shows tools in Hermes's format. Training stops after ``--minutes`` and goes on where it was when it is started
again; exit code 75 (EX_TEMPFAIL) says that it is not at its end.
"""

from __future__ import annotations

import argparse
import random
import shutil
import sys
import time
from pathlib import Path
from typing import Final

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils.logging import disable_progress_bar

from chores.chores import HABITS, KINDS, Chore, chore, demonstration
from chores.pieces import UNFINISHED, Checkpoint
from chores.world import ChoreWorld
from grpo.learner import logprobs_of
from tiny_policy.conversation import Conversation
from tiny_policy.train import computes_in_bfloat16
from tiny_policy.world import offered_tools
from turnstile_server.demo.real_model import TOOLS_TEMPLATE
from turnstile_server.rendering.factory import create_renderer
from turnstile_server.rendering.protocol import Renderer
from turnstile_server.settings import RenderingSettings

BATCH: Final = 8
RATE: Final = 2e-4
WARM_UP: Final = 10
CLIP: Final = 1.0
SEED: Final = 1


def with_tools(model: Path, out: Path) -> None:
    """Copies the folder ``model`` to ``out`` with the template that shows tools."""
    shutil.copytree(model, out)
    shutil.copyfile(TOOLS_TEMPLATE, out / "chat_template.jinja")


def demonstrated(
    renderer: Renderer,
    tokenizer: PreTrainedTokenizerBase,
    task: Chore,
    draw: random.Random,
    habits: dict[str, float] = HABITS,
) -> Conversation[Chore]:
    """One demonstration, token for token as through the gate."""
    conversation = Conversation(renderer, offered_tools(), task, ChoreWorld(task.files))
    conversation.follow(
        [*tokenizer.encode(text, add_special_tokens=False), int(tokenizer.eos_token_id)]
        for text in demonstration(task, draw, habits)
    )
    if not conversation.exact:
        raise AssertionError(f"a demonstrator made a call that is not played in memory: {task.instruction}")
    return conversation


def batch_loss(network: PreTrainedModel, rows: list[Conversation[Chore]]) -> torch.Tensor:
    """Mean cross-entropy, in nats, over what the demonstrators said."""
    length = max(len(row.ids) for row in rows)
    ids = torch.zeros(len(rows), length, dtype=torch.int64)
    mask = torch.zeros(len(rows), length - 1, dtype=torch.bool)
    for index, row in enumerate(rows):
        ids[index, : len(row.ids)] = torch.tensor(row.ids)
        mask[index, : len(row.ids) - 1] = torch.tensor(row.mask[1:], dtype=torch.bool)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=computes_in_bfloat16()):
        found = logprobs_of(network, ids, mask)
    return -found.sum() / mask.sum()


def train(checkpoint: Checkpoint, steps: int, minutes: float) -> bool:
    """Trains until ``steps`` or for ``minutes``; True at the end."""
    started = time.monotonic()
    network = AutoModelForCausalLM.from_pretrained(checkpoint.folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(checkpoint.folder)
    renderer = create_renderer(checkpoint.folder, RenderingSettings())
    optimizer = torch.optim.AdamW(network.parameters(), lr=RATE, weight_decay=0.0, betas=(0.9, 0.95))
    checkpoint.load_optimizer(optimizer)
    network.train()
    while checkpoint.steps < steps and time.monotonic() - started < minutes * 60:
        draw = random.Random(f"{SEED}-{checkpoint.steps}")
        tasks = [chore(draw, KINDS[index % len(KINDS)]) for index in range(BATCH)]
        rows = [demonstrated(renderer, tokenizer, task, draw) for task in tasks]
        done = checkpoint.steps / steps
        for group in optimizer.param_groups:
            group["lr"] = RATE * min(1.0, (checkpoint.steps + 1) / WARM_UP, 1.1 - done)
        loss = batch_loss(network, rows)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(network.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        checkpoint.steps += 1
        print(f"{time.monotonic() - started:5.0f} s  step {checkpoint.steps}  loss {loss.item():.4f}", flush=True)
    checkpoint.save(network, optimizer)
    return checkpoint.steps >= steps


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--minutes", type=float, default=9.0)
    arguments = parser.parse_args()
    disable_progress_bar()  # type: ignore[no-untyped-call]
    torch.set_num_threads(2)
    torch.manual_seed(SEED)
    checkpoint = Checkpoint.opened(arguments.out, lambda folder: with_tools(arguments.model, folder))
    return 0 if train(checkpoint, arguments.steps, arguments.minutes) else UNFINISHED


if __name__ == "__main__":
    sys.exit(main())
