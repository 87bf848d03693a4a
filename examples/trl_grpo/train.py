"""TRL's AsyncGRPOTrainer on Turnstile, on this machine, without a GPU: the tiny policy learns to do its errands.

    pip install 'turnstile-rl[server,embedded,trl]'
    python -m trl_grpo.train OUT [--steps 64] [--sandbox local]     (in examples/)

1. `turnstile serve` is started on the tiny policy. TRL's trainer takes Turnstile's worker and weight transfer. The
   worker plays groups of errands without end: an agent process in a sandbox calls the model and the tools, and a
   hidden test gives the reward. After every step the engine loads the trained weights, while episodes go on.
2. The success rate on held-out errands is measured before and after.
3. Every token that was recorded is scored again by the weights that its version names. Everything is stopped.

OUT gets `log.jsonl` and the last weights. With `--model`, `--tasks` (ids of the server's tasks) and `--agent` the
same trains another model; then nothing is held out.
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
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import PrinterCallback, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.utils import logging as hf_logging
from trl.experimental.async_grpo.async_grpo_config import AsyncGRPOConfig
from trl.experimental.async_grpo.async_grpo_trainer import AsyncGRPOTrainer

from tiny_policy.evaluate import held_out, play, score
from trl_grpo.on_cpu import CPU_ARGUMENTS, attend_on_cpu, no_cuda_device
from trl_grpo.rescore import Rescored, rescore
from turnstile import Client, TurnstileError
from turnstile.exporters.trl import TurnstileRolloutWorker, TurnstileServers, TurnstileWeightTransfer, task_dataset
from turnstile.models import Sample, TaskInfo
from turnstile_server.demo import TINY
from turnstile_server.demo.errands import LEVELS, errands
from turnstile_server.demo.local_server import LocalServer, LocalServerError, interrupt_on_termination, serve

AGENT = "plain-loop"
LIMITS = {"max_turns": 10, "max_completion_tokens": 96, "wall_s": 120.0}
HELD_OUT_SEED = 1009
"""Of the held-out errands: those that `grpo.grpo` is judged by."""
TOLERANCE = 1e-3
"""Nats by which the trainer's and the engine's log-probabilities may differ: both are float32 on one machine."""
SHOWN = ("turnstile/reward_mean", "reward", "ratio", "kl", "clip_ratio/region_mean", "sample/staleness_mean")
"""Of TRL's log, on the terminal. The first is of all rollouts, `reward` of the groups that were trained."""


class ExampleError(Exception):
    """Something that must hold does not."""


@dataclass(frozen=True)
class Run:
    """What is to be trained, and where. ``batch``: rows per update; ``keep``: folders of weights kept."""

    model: Path
    work: Path
    tasks: list[Any]
    agent: Any = AGENT
    steps: int = 64
    n: int = 8
    batch: int = 16
    learning_rate: float = 1e-4
    max_inflight: int = 32
    max_staleness: int = 4
    skip_flat: bool = True
    keep: int = 1000
    seed: int = 1
    limits: dict[str, Any] = field(default_factory=lambda: dict(LIMITS))


def make_trainer(run: Run, servers: TurnstileServers) -> AsyncGRPOTrainer:
    worker = TurnstileRolloutWorker(
        servers,
        run.tasks,
        agent=run.agent,
        n=run.n,
        max_inflight=run.max_inflight,
        skip_flat=run.skip_flat,
        limits=run.limits,
    )
    weights = TurnstileWeightTransfer(servers, model=run.model, folder=run.work / "weights", keep=run.keep)
    arguments = AsyncGRPOConfig(
        output_dir=str(run.work / "trainer"),
        max_steps=run.steps,
        per_device_train_batch_size=run.batch,
        num_generations=run.n,
        max_staleness=run.max_staleness,
        learning_rate=run.learning_rate,
        max_grad_norm=0.5,
        epsilon=0.2,
        epsilon_high=0.28,
        temperature=1.0,  # the one that the servers sample with: TRL computes ratios with it
        token_budget=0,  # any number will do; without one TRL asks a vLLM server
        seed=run.seed,
        **CPU_ARGUMENTS,
    )
    data = task_dataset([TaskInfo(id=str(number), instruction="") for number in range(len(run.tasks))])
    with no_cuda_device():
        trainer = AsyncGRPOTrainer(
            model=str(run.model),
            args=arguments,
            train_dataset=data,
            rollout_worker=worker,
            weight_transfer=weights,
        )
    attend_on_cpu(trainer.model)
    trainer.remove_callback(PrinterCallback)
    return trainer


class Log(TrainerCallback):
    """What TRL logs, as a line of JSON per step in ``log.jsonl`` and a readable one on the terminal."""

    def __init__(self, out: Path) -> None:
        self._file = out / "log.jsonl"
        self._started = time.monotonic()

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        logs = kwargs["logs"]
        if "loss" not in logs:
            return  # the summary at the end
        shown = [f"{name.rpartition('/')[2]} {logs[name]:.3g}" for name in SHOWN if logs.get(name) is not None]
        self.write(
            {"kind": "step", "step": state.global_step, **logs},
            "  ".join([f"step {state.global_step:3d}", *shown]),
        )

    def write(self, entry: dict[str, Any], line: str) -> None:
        seconds = time.monotonic() - self._started
        with self._file.open("a") as file:
            file.write(json.dumps({"seconds": round(seconds, 1), **entry}) + "\n")
        print(f"{seconds:6.0f} s  {line}", flush=True)


def check_recorded(run: Run, servers: TurnstileServers) -> Rescored:
    """Scores what the run recorded by the weights that it names.

    Raises ExampleError where a version is unknown or a log-probability differs.
    """

    def folder_of(name: str) -> Path:
        if servers.model_version(name) is None:
            raise ExampleError(f"tokens were sampled by {name}, which this run did not send")
        return run.work / "weights" / name

    with servers.client() as client:
        found = rescore(_recorded(client, servers.run), folder_of)
    if found.worst > TOLERANCE:
        raise ExampleError(f"a recorded log-probability is {found.worst:.1e} nats off")
    return found


def _recorded(client: Client, run: str) -> Iterator[Sample]:
    for episode in client.episodes():
        if (episode.group_id or "").startswith(f"{run}-"):
            for sample in client.episode(episode.episode_id).samples().samples:
                if sample.loss_mask.any():
                    yield sample


@contextmanager
def served(model: Path, work: Path, *options: str) -> Iterator[LocalServer]:
    """A private server, for a block that is not async: TRL's trainer wants the main thread."""
    with asyncio.Runner() as loop:
        stack = AsyncExitStack()
        try:
            chosen = ["--durability", "process", *options]
            yield loop.run(stack.enter_async_context(serve(model, work / "data", options=chosen)))
        finally:
            loop.run(stack.aclose())


def train(run: Run, log: Log, *options: str) -> Path:
    """Returns the folder of the last weights. Raises ExampleError."""
    with served(run.model, run.work, *options) as server:
        servers = TurnstileServers(server.control_url, key=server.control_key, run="example")
        trainer = make_trainer(run, servers)
        trainer.add_callback(log)
        trainer.train()
        last = servers.weight_name(run.steps + 1)
        with servers.client() as client:
            (engine,) = client.engine().values()
        if engine.weight_version != last:
            raise ExampleError(f"the engine has {engine.weight_version} after {run.steps} steps")
        found = check_recorded(run, servers)
    log.write(
        {"kind": "rescored", **asdict(found)},
        f"{found.tokens} trained tokens of {found.rows} rows ({found.mixed} rows of several versions) were scored "
        f"again by the weights that they name, {found.versions} versions: off by {found.worst:.1e} nats at most",
    )
    return run.work / "weights" / last


def judge(model: Path, version: int, episodes: int, log: Log) -> None:
    """The success rate on held-out errands, played in memory (``tiny_policy.evaluate``)."""
    found = score(play(model, held_out(episodes, HELD_OUT_SEED), seed=HELD_OUT_SEED))
    entry = {"rate": found.rate, "standard_error": found.standard_error}
    log.write({"kind": "held out", "version": version, **entry}, f"held out, weights {version}: {found}")


def example(arguments: argparse.Namespace, work: Path) -> None:
    log = Log(arguments.out)
    own = arguments.model is None and arguments.tasks is None
    model = arguments.model or TINY
    drawn = itertools.islice(errands(arguments.seed, LEVELS), 2000)
    tasks = arguments.tasks or [errand.task() for errand in drawn]
    run = Run(model, work, tasks, arguments.agent, arguments.steps, seed=arguments.seed)
    if own:
        judge(model, 0, arguments.held_out, log)
    last = train(run, log, "--sandbox", arguments.sandbox)
    if own:
        judge(last, run.steps, arguments.held_out, log)
    shutil.copytree(last, arguments.out / "weights")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path, help="folder for log.jsonl and the last weights")
    parser.add_argument("--steps", type=int, default=64, help="updates, of two groups of eight each")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--sandbox", default="auto", help="auto, docker or local")
    parser.add_argument("--held-out", type=int, default=600, help="errands played before and after")
    parser.add_argument("--model", type=Path, help="Hugging Face folder; default: the tiny policy")
    parser.add_argument("--agent", default=AGENT, help="one that the server launches")
    parser.add_argument("--tasks", type=lambda ids: ids.split(","), help="ids, with commas; default: errands")
    arguments = parser.parse_args()
    if arguments.out.exists():
        parser.error(f"{arguments.out} exists: name a new folder, or remove it")
    arguments.out.mkdir(parents=True)
    hf_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    torch.set_num_threads(1)
    try:
        with tempfile.TemporaryDirectory(prefix="turnstile-trl-") as folder:
            example(arguments, Path(folder))
    except (ExampleError, LocalServerError, TurnstileError) as error:
        print(f"Failed: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    interrupt_on_termination()
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
