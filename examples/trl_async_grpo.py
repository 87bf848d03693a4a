"""TRL's AsyncGRPOTrainer on Turnstile, on this machine, without a GPU: a few real training steps.

    pip install 'turnstile-rl[server,embedded,trl]'
    python examples/trl_async_grpo.py [--steps 6]

1. A tiny random-weight model is made (or found in .cache) and `turnstile serve` is started on it.
2. TRL's trainer takes Turnstile's worker and weight transfer. The worker plays groups of one task; for each
   rollout an agent process (one_answer.py) asks the model and hands in what it says, which the server grades: 1
   for an answer that begins with a small letter.
3. After every step the engine loads the trained weights, and later tokens say so.
4. It is checked that the tokens the trainer got were recorded under the weights that their version names: their
   log-probabilities are recomputed from those weights. Everything is stopped.

With `--model`, `--tasks` (ids of the server's tasks) and `--agent` (one that the server launches) the same trains
another model on tasks with sandboxes, tools and hidden tests.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PrinterCallback
from transformers.utils import logging as hf_logging
from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer

from local import LocalServer, serve, tiny_model
from one_answer import play
from trl_on_cpu import attend_on_cpu, no_cuda_device
from turnstile import Client
from turnstile.exporters.trl import TurnstileRolloutWorker, TurnstileServers, TurnstileWeightTransfer, task_dataset
from turnstile.models import Sample, TaskInfo

TASK = {"instruction": "Say a word.", "answer": {"kind": "regex", "value": "(?s)[a-z].*"}}
TOLERANCE = 1e-3
"""Nats by which the trainer's and the engine's log-probabilities may differ: both are float32 on one machine."""


class ExampleError(Exception):
    """Something that must hold does not."""


@dataclass(frozen=True)
class Run:
    """What is to be trained, and where. ``keep``: folders of weights kept."""

    model: Path
    work: Path
    tasks: list[Any]
    agent: Any
    steps: int
    n: int = 8
    batch: int = 16
    learning_rate: float = 2e-3
    max_staleness: int = 2
    max_tokens: int = 2
    keep: int = 1000


def make_trainer(run: Run, servers: TurnstileServers) -> AsyncGRPOTrainer:
    worker = TurnstileRolloutWorker(
        servers,
        run.tasks,
        agent=run.agent,
        n=run.n,
        max_inflight=run.max_staleness * run.batch,
        limits={"max_completion_tokens": run.max_tokens},
    )
    weights = TurnstileWeightTransfer(servers, model=run.model, folder=run.work / "weights", keep=run.keep)
    arguments = AsyncGRPOConfig(
        output_dir=str(run.work / "trainer"),
        max_steps=run.steps,
        per_device_train_batch_size=run.batch,
        num_generations=run.n,
        max_staleness=run.max_staleness,
        learning_rate=run.learning_rate,
        temperature=1.0,  # the one that the servers sample with: TRL computes ratios with it
        token_budget=0,  # any number will do; without one TRL asks a vLLM server
        bf16=False,
        use_cpu=True,
        gradient_checkpointing=False,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
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
    trainer.remove_callback(PrinterCallback)  # some lines of our own are printed in the end
    return trainer


def check_recorded(run: Run, servers: TurnstileServers) -> tuple[int, int, float]:
    """Recomputes what was recorded from the weights that it names: (tokens, versions, largest difference in nats).

    Raises ExampleError where a version is unknown or a log-probability differs.
    """
    models: dict[str, Any] = {}
    tokens, worst = 0, 0.0
    with servers.client() as client:
        for episode in client.episodes():
            for sample in client.episode(episode.episode_id).samples().samples:
                (name,) = sample.weight_version_names[:1] or ("none",)
                if len(sample.weight_version_names) != 1:
                    continue  # an update fell into its middle
                if servers.model_version(name) is None:
                    raise ExampleError(f"{sample.sample_id} was sampled by {name}, which this run did not send")
                if name not in models:
                    models[name] = AutoModelForCausalLM.from_pretrained(run.work / "weights" / name).eval()
                worst = max(worst, distance(models[name], sample))
                tokens += int(sample.loss_mask.sum())
    if worst > TOLERANCE:
        raise ExampleError(f"a recorded log-probability is {worst:.1e} nats off")
    return tokens, len(models), worst


@torch.no_grad()
def distance(model: Any, sample: Sample) -> float:
    """By how many nats at most ``model`` scores a trained token of ``sample`` otherwise than was recorded."""
    ids = torch.tensor(sample.input_ids, dtype=torch.long)
    scores = model(ids[None]).logits[0, :-1].float().log_softmax(-1).gather(1, ids[1:, None])[:, 0]
    recorded = torch.tensor(sample.logprobs[1:])
    return float((scores - recorded).abs()[torch.tensor(sample.loss_mask[1:] == 1)].max())


@contextmanager
def served(model: Path, work: Path) -> Iterator[LocalServer]:
    """A private server, for a block that is not async: TRL's trainer wants the main thread."""
    with asyncio.Runner() as loop:
        stack = AsyncExitStack()
        try:
            options = ["--config", str(_configuration(work))]
            yield loop.run(stack.enter_async_context(serve(model, work / "data", options=options)))
        finally:
            loop.run(stack.aclose())


def _configuration(work: Path) -> Path:
    file = work / "turnstile.toml"
    file.write_text('[journal]\ndurability = "process"\n')
    return file


def example(arguments: argparse.Namespace, work: Path) -> None:
    model = arguments.model or tiny_model()
    agent, tasks = (arguments.agent, arguments.tasks) if arguments.agent else (play, [TASK])
    run = Run(model, work, tasks, agent, arguments.steps, max_tokens=arguments.max_tokens)
    with served(model, work) as server:
        servers = TurnstileServers(server.control_url, key=server.control_key, run="example")
        trainer = make_trainer(run, servers)
        trainer.train()
        with Client(server.control_url, key=server.control_key) as client:
            (engine,) = client.engine().values()
        tokens, versions, worst = check_recorded(run, servers)
    for logged in trainer.state.log_history[:-1]:
        shown = {name: logged.get(name) for name in ("step", "reward", "sample/staleness_max", "ratio", "loss")}
        print("  ".join(f"{name} {value:.3g}" for name, value in shown.items() if value is not None))
    if engine.weight_version != servers.weight_name(run.steps + 1):
        raise ExampleError(f"the engine has {engine.weight_version} after {run.steps} steps")
    print(
        f"Passed: {run.steps} steps, the engine has {engine.weight_version}. {tokens} trained tokens of "
        f"{versions} versions were scored again by the weights that they name: off by {worst:.1e} nats at most."
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--model", type=Path, help="Hugging Face folder; default: the tiny model")
    parser.add_argument("--agent", help="one that the server launches; needs --tasks")
    parser.add_argument("--tasks", type=lambda ids: ids.split(","), help="ids, with commas")
    parser.add_argument("--max-tokens", type=int, default=2, help="per model call")
    arguments = parser.parse_args()
    if (arguments.agent is None) != (arguments.tasks is None):
        parser.error("--agent and --tasks go together")
    hf_logging.disable_progress_bar()
    try:
        with tempfile.TemporaryDirectory(prefix="turnstile-trl-") as folder:
            example(arguments, Path(folder))
    except ExampleError as error:
        print(f"Failed: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
