"""One run of GRPO on chores: a real agent plays, the upper layers of a real small model learn.

    python -m chores.run START OUT --arm exact --seed 1 [--steps 10] [--minutes 9]       (in examples/)

START is what chores.start makes; arms are those of chores.arms. Steps are synchronous: groups are played on the
weights of the step, then trained in one pass. A piece stops before ``--minutes`` are over and goes on when it is
started again, with exit code 75 until the run is at its end. OUT/log.jsonl has a line for each step.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import math
import os
import shutil
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils.logging import disable_progress_bar

from chores.arms import ARMS, RENDERED, Transcript, rows_of_arm, runs
from chores.chores import chores
from chores.pieces import UNFINISHED, Checkpoint
from grpo.learner import GrpoSettings, Learner, Padded, Row, logprobs_of
from program import exit_code_of, run_program
from tiny_policy.world import offered_tools
from turnstile import AsyncClient, Rollout, advantages
from turnstile.models import Sample
from turnstile_server.demo.local_server import serve

AGENT: Final = "plain-loop"
LIMITS: Final = {"max_turns": 6, "max_completion_tokens": 80, "wall_s": 300.0}
THREADS: Final = 2
WIDTH: Final = 32
"""Episodes at once, and calls that the engine decodes together."""


@dataclass(frozen=True, slots=True)
class ChoreSettings:
    steps: int = 10
    groups: int = 8
    group_size: int = 4
    trained_layers: int = 10
    """The upper ones of thirty; the rest stays as it is, which halves the time of an update."""
    rate: float = 4e-5
    evaluation: int = 96
    """Held-out episodes, each of another chore, before the first step and after the last."""
    seed: int = 1


class RunError(Exception):
    """The run cannot go on; the message says why."""


@dataclass(frozen=True, slots=True)
class Distance:
    """How far the tokens of an arm are from those that were sampled, under the weights of the step.

    ``replies`` of graded rollouts; ``other_ids``: the share whose ids are others. ``gap``: mean over sampled
    tokens of |log p(what is trained) − recorded log p(what was sampled)|, summed over each reply first, in nats.
    ``kl``: the same with its sign (k1). ``outside``: the share of replies whose ratio is outside the clip.
    """

    replies: int
    other_ids: float
    gap: float
    kl: float
    outside: float


class Run:
    """``client``: of a server on the checkpoint's weights."""

    def __init__(self, client: AsyncClient, checkpoint: Checkpoint, arm: str, settings: ChoreSettings) -> None:
        self._client = client
        self._checkpoint = checkpoint
        self._arm = arm
        self._settings = settings
        self._network: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            checkpoint.folder, dtype=torch.float32
        )
        self._tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(checkpoint.folder)
        layers: Any = self._network.base_model.layers
        for parameter in self._network.parameters():
            parameter.requires_grad = False
        for layer in layers[len(layers) - settings.trained_layers :]:
            for parameter in layer.parameters():
                parameter.requires_grad = True
        grpo = GrpoSettings(rate=settings.rate, minibatches=2, rows_at_once=8, max_norm=1.0)
        self._grpo = grpo
        self.learner = Learner(self._network, grpo, settings.seed)
        checkpoint.load_optimizer(self.learner.optimizer)
        self._tools = [dict(tool.spec) for tool in offered_tools()]

    async def evaluate(self) -> dict[str, Any]:
        """Held-out chores of this seed, solved once each at temperature 1."""
        drawn = chores(f"held-out-{self._settings.seed}", held_out=True)
        rollouts = await self._play(list(itertools.islice(drawn, self._settings.evaluation)), 1)
        rewards = [rollout.reward for rollout in rollouts if rollout.reward is not None]
        rate = sum(rewards) / len(rewards)
        error = math.sqrt(rate * (1 - rate) / len(rewards))
        return {"rate": rate, "standard_error": error, "episodes": len(rewards)}

    async def step(self) -> dict[str, Any]:
        """Plays, trains and gives the engine the new weights."""
        settings, step = self._settings, self._checkpoint.steps
        tasks = list(itertools.islice(chores(f"{settings.seed}-{step}"), settings.groups))
        began = time.monotonic()
        rollouts = await self._play(tasks, settings.group_size)
        played = time.monotonic()
        rows, distance = await self._rows(rollouts)
        trained = [row for row in rows if row.advantage]
        if not trained:
            raise RunError(f"step {step}: all groups have equal rewards")
        self.learner.reseed(f"{settings.seed}-{step}")
        update = await asyncio.to_thread(self.learner.step, trained, step)
        updated = time.monotonic()
        self._checkpoint.steps += 1
        self._checkpoint.save(self._network, self.learner.optimizer)
        await self._client.update_weights(str(self._checkpoint.folder), str(self._checkpoint.steps))
        rewards = [rollout.reward for rollout in rollouts if rollout.reward is not None]
        return {
            "reward": sum(rewards) / len(rewards),
            "graded": len(rewards),
            "rows": len(trained),
            "row_tokens": sum(len(row.sample.input_ids) for row in trained),
            **{f"distance_{name}": value for name, value in asdict(distance).items()},
            **asdict(update),
            "play_s": round(played - began, 1),
            "train_s": round(updated - played, 1),
        }

    async def _play(self, tasks: Sequence[Any], n: int) -> list[Rollout]:
        inline = [task.task() for task in tasks]
        played = self._client.rollouts(inline, agent=AGENT, n=n, limits=LIMITS, max_concurrent=WIDTH)
        return [rollout async for rollout in played]

    async def _rows(self, rollouts: Sequence[Rollout]) -> tuple[list[Row], Distance]:
        weights = advantages(rollouts)
        rows: list[Row] = []
        pairs: list[tuple[Sequence[Sample], Sequence[Sample]]] = []
        for rollout in rollouts:
            if rollout.rollout_id not in weights or rollout.samples is None or rollout.episode is None:
                continue
            transcript = Transcript((), self._tools)
            if self._arm in RENDERED:
                turns = await self._client.episode(rollout.episode.episode_id).turns()
                transcript = Transcript(turns, self._tools)
            recorded = [sample for sample in rollout.samples.samples if sample.loss_mask.any()]
            if not recorded:
                continue
            made = rows_of_arm(self._arm, recorded, transcript, self._tokenizer)
            made = await asyncio.to_thread(self._rescored, made)
            pairs.append((recorded, made))
            if self._arm not in RENDERED:
                made = rows_of_arm(self._arm, recorded, transcript, self._tokenizer)
            rows += [Row(row, weights[rollout.rollout_id], self._checkpoint.steps) for row in made]
        return rows, distance_of(pairs, self._grpo)

    def _rescored(self, rows: Sequence[Sample]) -> list[Sample]:
        """``rows`` with the log-probabilities that the learner computes."""
        padded = Padded([Row(row, 0.0, 0) for row in rows])
        with torch.no_grad():
            found = logprobs_of(self._network, padded.ids, padded.mask).numpy()
        return [
            row.model_copy(
                update={"logprobs": np.concatenate(([0], found[at, : len(row.input_ids) - 1])).astype(np.float32)}
            )
            for at, row in enumerate(rows)
        ]


def distance_of(pairs: Sequence[tuple[Sequence[Sample], Sequence[Sample]]], settings: GrpoSettings) -> Distance:
    """``pairs``: the recorded rows of each rollout, and those of the arm with recomputed log-probabilities."""
    replies = other = outside = tokens = 0
    gap = kl = 0.0
    for recorded, made in pairs:
        sampled, trained = (
            [
                (row.input_ids[start:end].tolist(), float(row.logprobs[start:end].sum()))
                for row in rows
                for start, end in runs(row.loss_mask)
            ]
            for rows in (recorded, made)
        )
        for (ids, before), (others, after) in zip(sampled, trained, strict=False):
            replies += 1
            tokens += len(ids)
            other += ids != others
            gap += abs(after - before)
            kl += before - after
            ratio = math.exp(min(after - before, 50.0))
            outside += not 1 - settings.clip_low <= ratio <= 1 + settings.clip_high
    return Distance(replies, other / replies, gap / tokens, kl / tokens, outside / replies)


async def run(
    start: Path, out: Path, arm: str, settings: ChoreSettings, minutes: float, before_of: Path | None = None
) -> bool:
    """One piece. True when the run is at its end. ``before_of``: the folder of another run of this seed, whose
    evaluation before the first step is taken over."""
    began = time.monotonic()
    checkpoint = Checkpoint.opened(out / "weights", lambda folder: fresh(start, folder))
    log = Log(out / "log.jsonl", checkpoint.steps)
    os.environ.update(TURNSTILE_ENGINE__THREADS=str(THREADS), TURNSTILE_ENGINE__MAX_BATCH=str(WIDTH))
    data = out / "data"
    shutil.rmtree(data, ignore_errors=True)
    options = ["--sandbox", "local", "--durability", "process"]
    async with (
        serve(checkpoint.folder, data, options=options) as server,
        AsyncClient(server.control_url, key=server.control_key) as client,
    ):
        await client.update_weights(str(checkpoint.folder), str(checkpoint.steps))
        running = Run(client, checkpoint, arm, settings)
        longest = 0.0
        while True:
            before = time.monotonic()
            if before - began + longest > minutes * 60:
                return False
            if checkpoint.steps == 0 and not log.evaluated(0) and before_of is not None:
                log.take(before_of)
            elif checkpoint.steps in (0, settings.steps) and not log.evaluated(checkpoint.steps):
                log.write("held out", checkpoint.steps, await running.evaluate())
            elif checkpoint.steps == settings.steps:
                return True
            else:
                found = await running.step()
                log.write("step", checkpoint.steps, found)
            longest = max(longest, time.monotonic() - before)


def fresh(start: Path, folder: Path) -> None:
    """The start's folder without the optimizer of its training."""
    shutil.copytree(start, folder, ignore=shutil.ignore_patterns("*.pt", "steps.json"))


class Log:
    """Lines of JSON. What a step wrote whose weights were not kept is dropped."""

    def __init__(self, path: Path, steps: int) -> None:
        self._path = path
        lines = path.read_text().splitlines() if path.exists() else []
        self._entries = [entry for entry in map(json.loads, lines) if entry["version"] <= steps]

    def evaluated(self, version: int) -> bool:
        return any(entry["kind"] == "held out" and entry["version"] == version for entry in self._entries)

    def take(self, other: Path) -> None:
        """The evaluation before the first step from the log of another run. Raises RunError where it has none."""
        log = Log(other / "log.jsonl", 0)
        if not log.evaluated(0):
            raise RunError(f"{other} has no evaluation before its first step")
        self._entries += [entry for entry in log._entries if entry["kind"] == "held out"]

    def write(self, kind: str, version: int, values: dict[str, Any]) -> None:
        self._entries.append({"kind": kind, "version": version, **values})
        self._path.write_text("".join(json.dumps(entry) + "\n" for entry in self._entries))
        shown = "  ".join(
            f"{name} {value:.3g}" if isinstance(value, float) else f"{name} {value}"
            for name, value in values.items()
        )
        print(f"{kind} {version}  {shown}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("start", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--arm", choices=ARMS, default="exact")
    defaults = ChoreSettings()
    for name in ("steps", "groups", "group_size", "seed", "evaluation", "trained_layers"):
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=getattr(defaults, name))
    parser.add_argument("--rate", type=float, default=defaults.rate)
    parser.add_argument("--before", type=Path, help="take the evaluation before the first step from this run")
    parser.add_argument("--minutes", type=float, default=9.0)
    arguments = parser.parse_args()
    disable_progress_bar()  # type: ignore[no-untyped-call]
    torch.set_num_threads(THREADS)
    names = ChoreSettings.__dataclass_fields__
    settings = ChoreSettings(**{name: vars(arguments)[name] for name in names})
    arguments.out.mkdir(parents=True, exist_ok=True)
    ended = False

    async def piece() -> None:
        nonlocal ended
        other = arguments.before if arguments.before != arguments.out else None
        out = arguments.out.resolve()
        ended = await run(arguments.start, out, arguments.arm, settings, arguments.minutes, other)

    code = exit_code_of(piece(), RunError)
    return code or (0 if ended else UNFINISHED)


if __name__ == "__main__":
    run_program(main)
