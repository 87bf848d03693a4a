"""GRPO on the tiny policy: a real agent plays episodes in sandboxes while the learner trains.

    python -m grpo.grpo OUT [--steps 16] [--seed 1]     (in examples/; docs/grpo.md has the results)
    python -m grpo.grpo OUT --wandb PROJECT --tensorboard FOLDER        (docs/loggers.md)
    python -m grpo.grpo OUT --engine sglang --engine-url http://127.0.0.1:30000

Without an engine of its own it plays on the embedded one. SGLang is given the weights as tensors, every other
engine as a folder.

The collector plays groups of episodes in an endless stream (`AsyncClient.rollouts`) and puts each finished group
into a queue. The learner takes the groups of a step, trains, and pushes the new weights to the engine under a new
version, while episodes continue. `client.trained` tells the server which rollouts a step took, so that its log,
TensorBoard and the viewer show the same numbers for the step. Each token keeps the log-probability of the weights
that sampled it, so an episode that saw two versions is still exact.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from contextlib import aclosing
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from grpo.boards import Boards
from grpo.learner import GrpoSettings, Learner, Row, Update
from local import ROOT
from program import exit_code_of, run_program
from tiny_policy.evaluate import Score
from turnstile import AsyncClient, Rollout, advantages, by_group, has_signal
from turnstile.loggers.base import RolloutLogger
from turnstile.models import statistics_by, summary_of
from turnstile_server.demo import TINY
from turnstile_server.demo.errands import LEVELS, errands
from turnstile_server.demo.local_server import SUPERVISED, serve, stopped_at_exit

EXAMPLES = ROOT / "examples"
AGENT = "plain-loop"
LIMITS = {"max_turns": 10, "max_completion_tokens": 96, "wall_s": 120.0}
MONITOR_SEED, FINAL_SEED = 7, 1009
"""Seeds of the held-out errands: those of the monitor, and those that are played once before and once after."""
PROGRESS_EVERY_S = 10.0


@dataclass(frozen=True, slots=True)
class RunSettings:
    steps: int = 16
    groups: int = 8
    """Groups with a signal per step. A group whose rewards are all equal teaches nothing; another replaces it."""
    most_groups: int = 20
    """Groups per step, replaced ones included: a policy that is nearly always right gives few with a signal."""
    hopeless_groups: int = 200
    """The run fails after this many groups in a row without a signal, and says how they ended."""
    group_size: int = 8
    staleness: int = 2
    """A group is dropped when the weights of its oldest token are more versions behind than this."""
    max_concurrent: int = 16
    monitor_every: int = 4
    monitor_episodes: int = 200
    final_episodes: int = 1000
    seed: int = 1
    run_id: str = "grpo"
    """Of all episodes, by which the viewer and `turnstile report` find them."""
    keep: bool = False
    """The weights of every step and the server's folder stay; else the last weights alone."""


class RunError(Exception):
    """The run cannot go on; the message says why."""


@dataclass(slots=True)
class Collected:
    """The groups that a step took: those that it trains, those that it leaves out, and how all of them ended."""

    used: list[list[Rollout]] = field(default_factory=list)
    left_out: list[list[Rollout]] = field(default_factory=list)
    played: Counter[str] = field(default_factory=Counter)


class Collector:
    """Plays groups in an endless stream; ``groups`` gives those that have a signal and are fresh enough.

    ``report`` is called with a sentence on the progress, after every finished group.
    """

    def __init__(
        self, client: AsyncClient, settings: RunSettings, report: Callable[[str], None] = lambda _: None
    ) -> None:
        self._client = client
        self._settings = settings
        self._report = report
        # Bounded, so that the collector waits for the learner instead of playing groups that become too old.
        self.finished: asyncio.Queue[list[Rollout]] = asyncio.Queue(maxsize=settings.groups)

    async def run(self) -> None:
        settings = self._settings
        options: dict[str, Any] = {"n": settings.group_size, "max_concurrent": settings.max_concurrent}
        tasks = (errand.task() for errand in errands(settings.seed, LEVELS))
        options["run_id"] = settings.run_id
        rollouts = self._client.rollouts(tasks, agent=AGENT, limits=LIMITS, **options)
        open_groups: dict[str, list[Rollout]] = {}
        async with aclosing(rollouts):
            async for rollout in rollouts:
                group = open_groups.setdefault(rollout.group_id, [])
                group.append(rollout)
                if len(group) == settings.group_size:
                    await self.finished.put(open_groups.pop(rollout.group_id))

    async def groups(self, version: int) -> Collected:
        """The groups of one step, for a learner at ``version``. Raises RunError when none can be used."""
        collected = Collected()
        taken = 0
        while len(collected.used) < self._settings.groups and not (
            collected.used and taken >= self._settings.most_groups
        ):
            if taken == self._settings.hopeless_groups:
                raise RunError(f"none of {taken} groups can be learned from: {dict(collected.played)}")
            taken += 1
            group = await self.finished.get()
            collected.played.update(map(outcome, group))
            rows = rows_of([group])
            if not rows or not has_signal(group):
                collected.played["groups without signal"] += 1
                collected.left_out.append(group)
            elif version - min(row.version for row in rows) > self._settings.staleness:
                collected.played["groups too old"] += 1
                collected.left_out.append(group)
            else:
                collected.used.append(group)
            self._report(
                f"{len(collected.used)} of {self._settings.groups} groups for step {version + 1}, "
                f"{taken * self._settings.group_size} episodes"
            )
        if not collected.used:
            raise RunError(
                f"none of {self._settings.most_groups} groups can be learned from: {dict(collected.played)}"
            )
        return collected


def outcome(rollout: Rollout) -> str:
    """How the rollout ended: its status, and the type of its error if it has one."""
    return rollout.status.value if rollout.error is None else f"{rollout.status.value}: {rollout.error.type}"


def flat(groups: list[list[Rollout]]) -> list[Rollout]:
    return list(itertools.chain.from_iterable(groups))


def rows_of(groups: list[list[Rollout]]) -> list[Row]:
    """The rows to train on: every sample of every graded rollout, with its rollout's advantage."""
    rollouts = flat(groups)
    found = advantages(rollouts)
    return [
        Row(sample, found[rollout.rollout_id], min(map(int, sample.weight_version_names)))
        for group in by_group(rollouts).values()
        for rollout in group
        if rollout.rollout_id in found and rollout.samples is not None
        for sample in rollout.samples.samples
    ]


class Weights:
    """Pushes the network to the engine, and saves it as ``v0``, ``v1``, …: the last one stays, with ``keep`` all.

    ``tensors``: the engine is sent the tensors themselves; else it loads the folder.
    """

    def __init__(
        self, client: AsyncClient, network: PreTrainedModel, folder: Path, *, tensors: bool, keep: bool
    ) -> None:
        self._client = client
        self._tensors = tensors
        self._keep = keep
        self._network = network
        self._tokenizer = AutoTokenizer.from_pretrained(TINY)
        self._folder = folder

    async def push(self, version: int) -> Path:
        folder = self._folder / f"v{version}"
        self._network.save_pretrained(folder)
        self._tokenizer.save_pretrained(folder)
        if self._tensors:
            # Parameters, not the state: that one has a tied output layer twice, the folder and the engine once.
            await self._client.update_weights_from_tensors(self._network.named_parameters(), str(version))
        else:
            await self._client.update_weights(str(folder), str(version))
        if not self._keep:
            shutil.rmtree(self._folder / f"v{version - 1}", ignore_errors=True)
        return folder


class Log:
    """Writes one line of JSON per step to ``log.jsonl`` and one readable line to the terminal. ``loggers`` get the
    rollouts of each step, too."""

    def __init__(self, out: Path) -> None:
        self._file = out / "log.jsonl"
        self._started = self._shown = time.monotonic()
        self.loggers: list[RolloutLogger] = []

    def progress(self, text: str) -> None:
        """Show ``text`` on the terminal unless something was shown in the last seconds."""
        now = time.monotonic()
        if now - self._shown >= PROGRESS_EVERY_S:
            self._shown = now
            print(f"{now - self._started:6.0f} s  … {text}", flush=True)

    def write(self, entry: dict[str, Any], line: str) -> None:
        self._shown = time.monotonic()
        seconds = self._shown - self._started
        with self._file.open("a") as file:
            file.write(json.dumps({"seconds": round(seconds, 1), **entry}) + "\n")
        print(f"{seconds:6.0f} s  {line}", flush=True)

    def score(self, name: str, version: int, found: Score) -> None:
        levels = {str(level): found.solved[level] / count for level, count in found.episodes.items()}
        entry = {"rate": found.rate, "standard_error": found.standard_error, "levels": levels}
        self.write({"kind": name, "version": version, **entry}, f"{name}, weights {version}: {found}")

    def step(self, version: int, rollouts: list[Rollout], played: Counter[str], update: Update) -> None:
        """``rollouts``: all that the step took, as ``client.trained`` gave them back."""
        total = statistics_by(summary_of(each.episode) for each in rollouts if each.episode is not None).total
        assert total.reward_mean is not None  # else the step had nothing to train
        entry = {
            "reward": total.reward_mean,
            "graded": total.graded,
            "trained_share": total.trained_share,
            "lag": total.lag_mean,
            "played": played,
            **asdict(update),
        }
        for logger in self.loggers:
            logger.log(rollouts, version)
        gap = "-" if update.fresh_gap is None else f"{update.fresh_gap:.0e}"
        self.write(
            {"kind": "step", "version": version, **entry},
            f"step {version:3d}  reward {total.reward_mean:.2f} of {total.graded:3d}  gap {gap}  "
            f"drift {update.drift:+.4f}  clipped {update.clipped:.1%}  trained {total.trained_share:.0%}  "
            f"lag {'-' if total.lag_mean is None else f'{total.lag_mean:.1f}'}",
        )


async def judge(checkpoint: Path, episodes: int, seed: int) -> Score:
    """The success rate on held-out errands, played in memory by ``tiny_policy.evaluate``.

    It runs in a process of its own, which can be ended at once and leaves the learner's interpreter alone. That
    process shows its progress on standard error.
    """
    print(f"          {episodes} held-out errands are played in memory …", flush=True)
    process = await asyncio.create_subprocess_exec(
        *(*SUPERVISED, sys.executable, "-m", "tiny_policy.evaluate", checkpoint, "--json"),
        *("--episodes", str(episodes), "--seed", str(seed)),
        cwd=EXAMPLES,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    async with stopped_at_exit(process):
        output = await process.stdout.read()
        await process.wait()
    if process.returncode != 0:
        raise RunError(f"the evaluation of {checkpoint} failed with exit code {process.returncode}")
    return Score.from_json(output)


async def learn(
    client: AsyncClient, out: Path, settings: RunSettings, grpo: GrpoSettings, log: Log, *, tensors: bool
) -> Path:
    """Train for ``settings.steps`` steps. Returns the folder of the last weights."""
    network = AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32)
    learner = Learner(network, grpo, settings.seed)
    collector = Collector(client, settings, log.progress)
    weights = Weights(client, network, out, tensors=tensors, keep=settings.keep)
    folder = await weights.push(0)
    collecting = asyncio.create_task(collector.run())
    try:
        for version in range(settings.steps):
            if version % settings.monitor_every == 0:
                log.score("monitor", version, await judge(folder, settings.monitor_episodes, MONITOR_SEED))
            collected = await _unless_ended(collecting, collector.groups(version))
            rows = rows_of(collected.used)
            update = await asyncio.to_thread(learner.step, rows, version)
            step, used, left_out = version + 1, flat(collected.used), flat(collected.left_out)
            rollouts = await client.trained(step, used, left_out=left_out, version=str(version))
            folder = await weights.push(step)
            log.step(step, rollouts, collected.played, update)
    finally:
        collecting.cancel()
        await asyncio.gather(collecting, return_exceptions=True)
    return folder


async def _unless_ended(collecting: asyncio.Task[None], wanted: Coroutine[Any, Any, Collected]) -> Collected:
    """The result of ``wanted``, or the collector's error if that comes first."""
    waiting = asyncio.create_task(wanted)
    await asyncio.wait({collecting, waiting}, return_when=asyncio.FIRST_COMPLETED)
    if collecting.done():
        waiting.cancel()
        collecting.result()
        raise RunError("the collector ended")
    return await waiting


async def run(
    out: Path,
    settings: RunSettings,
    grpo: GrpoSettings,
    options: list[str],
    engine: str = "embedded",
    engine_urls: Sequence[str] = (),
    boards: Boards | None = None,
) -> None:
    log = Log(out)
    log.score("held out", 0, await judge(TINY, settings.final_episodes, FINAL_SEED))
    print("          the server starts …", flush=True)
    with tempfile.TemporaryDirectory(prefix="turnstile-grpo-") as work:
        data = (out if settings.keep else Path(work)) / "data"
        async with (
            serve(TINY, data, engine=engine, engine_url=engine_urls, options=options) as server,
            AsyncClient(server.control_url, key=server.control_key) as client,
        ):
            with (boards or Boards()).opened(out, server.control_url) as log.loggers:
                last = await learn(client, out, settings, grpo, log, tensors=engine == "sglang")
    log.score("held out", settings.steps, await judge(last, settings.final_episodes, FINAL_SEED))


def main() -> int:
    parser = argparse.ArgumentParser(description="GRPO on the tiny policy.")
    parser.add_argument("out", type=Path, help="folder for log.jsonl and the last weights")
    parser.add_argument("--sandbox", default="auto", help="auto, docker or local")
    parser.add_argument("--engine", default="embedded", help="embedded, sglang or vllm")
    parser.add_argument("--engine-url", action="append", default=[], help="of a running engine; may be repeated")
    defaults = RunSettings()
    names = ["steps", "seed", "groups", "group_size", "max_concurrent", "staleness"]
    names += ["monitor_episodes", "final_episodes"]
    for name in names:
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=getattr(defaults, name))
    parser.add_argument("--rate", type=float, default=GrpoSettings().rate)
    parser.add_argument("--run-id", default=defaults.run_id, help="the run that the episodes belong to")
    parser.add_argument("--tensorboard", type=Path, metavar="FOLDER", help="log to TensorBoard, too")
    parser.add_argument("--wandb", metavar="PROJECT", help="log to Weights & Biases, too")
    parser.add_argument(
        "--keep", action="store_true", help="keep the weights of every step, and the server's records in OUT/data"
    )
    arguments = parser.parse_args()
    disable_progress_bar()  # type: ignore[no-untyped-call]
    if arguments.out.exists():
        parser.error(f"{arguments.out} exists: name a new folder, or remove it")
    arguments.out.mkdir(parents=True)
    torch.set_num_threads(1)
    torch.manual_seed(arguments.seed)
    settings = RunSettings(**{name: vars(arguments)[name] for name in (*names, "run_id", "keep")})
    options = ["--sandbox", arguments.sandbox, "--durability", "process"]
    grpo = GrpoSettings(rate=arguments.rate)
    boards = Boards(arguments.tensorboard, arguments.wandb)
    work = run(arguments.out.resolve(), settings, grpo, options, arguments.engine, arguments.engine_url, boards)
    return exit_code_of(work, RunError)


if __name__ == "__main__":
    run_program(main)
