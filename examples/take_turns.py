"""A trainer and an engine that share one machine take turns: each frees its memory while the other works.

    python -m take_turns OUT [--rounds 3]     (in examples/)
    python -m take_turns OUT --engine-url http://127.0.0.1:30000     a running SGLang on a GPU, with
                                                                     --enable-memory-saver
    python -m take_turns OUT --engine vllm --engine-url URL          vLLM with --enable-sleep-mode and
                                                                     VLLM_SERVER_DEV_MODE=1

A round: the engine plays episodes; `sleep` frees its weights and cache; the trainer loads the network, makes one
optimizer step, saves it as `OUT/v1`, `OUT/v2`, … and lets go of it; `wake`, `update_weights` and `resume` bring
the engine back with the new weights. An engine that cannot sleep says why before anything is played.

Memory is resident memory. That of an engine at a URL is not shown: it may be on a GPU, and another user's.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from grpo.grpo import rows_of
from grpo.learner import GrpoSettings, Learner, Row, Update
from program import exit_code_of, run_program
from turnstile import AsyncClient, Rollout, by_group
from turnstile.errors import InvalidRequest
from turnstile_server.demo import TINY
from turnstile_server.demo.errands import LEVELS, Errand, errands
from turnstile_server.demo.local_server import descendants, serve
from turnstile_server.engines.embedded.heap import give_back

AGENT = "plain-loop"
LIMITS = {"max_turns": 10, "max_completion_tokens": 96, "wall_s": 300.0}
ONE_STEP = GrpoSettings(passes=1, minibatches=1)
MIB = 1 << 20
ADVICE = (
    "Take turns with the embedded engine, or with one on a GPU: SGLang with --enable-memory-saver, vLLM with "
    "--enable-sleep-mode. Beside an engine that cannot sleep, give the trainer memory of its own and update the "
    "weights while the engine serves, as examples/grpo does."
)


class CannotTakeTurns(Exception):
    """The engine keeps its memory; the message says why, and what to do."""


class Trainer:
    """Has a network in memory from ``load`` to ``release`` alone.

    Adam's moments go with the network, for brevity: every step is a first step. A trainer that keeps them saves
    them beside the weights.
    """

    def __init__(self, model: Path, out: Path, seed: int) -> None:
        self.folder = model
        """The newest weights."""
        self._out = out
        self._seed = seed
        self._tokenizer = AutoTokenizer.from_pretrained(model)
        self._network: PreTrainedModel | None = None

    def load(self) -> None:
        self._network = AutoModelForCausalLM.from_pretrained(self.folder, dtype=torch.float32)

    def step(self, rows: Sequence[Row], version: int) -> Update:
        """One optimizer step on what the weights ``version`` sampled; saves the next weights."""
        if self._network is None:
            raise RuntimeError("the network is not loaded")
        update = Learner(self._network, ONE_STEP, self._seed).step(rows, version)
        self.folder = self._out / f"v{version + 1}"
        self._network.save_pretrained(self.folder)
        self._tokenizer.save_pretrained(self.folder)
        return update

    def release(self) -> None:
        self._network = None
        give_back()


def embedded_engine(server: int) -> int | None:
    """The process of the embedded engine below the server's; None where its engine is at a URL."""
    for pid, _ in descendants(server):
        if b"turnstile_server.engines.embedded.worker" in Path(f"/proc/{pid}/cmdline").read_bytes():
            return pid
    return None


def resident_mib(pid: int | None) -> str:
    """proc(5): the second field of statm counts resident pages."""
    if pid is None:
        return "    -"
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return f"{pages * os.sysconf('SC_PAGE_SIZE') / MIB:5.0f}"


async def play(client: AsyncClient, tasks: Iterator[Errand], groups: int, size: int) -> list[Rollout]:
    chosen = [errand.task() for errand in itertools.islice(tasks, groups)]
    options: dict[str, Any] = {"agent": AGENT, "n": size, "max_concurrent": 4, "limits": LIMITS}
    return [rollout async for rollout in client.rollouts(chosen, **options)]


async def check_sleeps(client: AsyncClient) -> None:
    """Raises CannotTakeTurns with the engine's own reason."""
    if all(info.sleeps for info in (await client.engine()).values()):
        return
    try:
        await client.sleep()
    except InvalidRequest as error:
        raise CannotTakeTurns(f"{error} {ADVICE}") from error


async def take_turns(
    client: AsyncClient, trainer: Trainer, engine: int | None, settings: argparse.Namespace
) -> None:
    def show(phase: str) -> None:
        memory = f"engine {resident_mib(engine)} MiB  trainer {resident_mib(os.getpid())} MiB"
        print(f"  {phase:22}{memory}", flush=True)

    await check_sleeps(client)
    await client.update_weights(str(trainer.folder), "0")
    tasks = errands(settings.seed, LEVELS)
    for version in range(settings.rounds):
        print(f"round {version + 1}, weights {version}", flush=True)
        rollouts = await play(client, tasks, settings.groups, settings.group_size)
        show("played")
        await client.sleep()
        show("engine asleep")
        await asyncio.to_thread(trainer.load)
        rows = rows_of(list(by_group(rollouts).values()))
        update = await asyncio.to_thread(trainer.step, rows, version)
        show("trained")
        trainer.release()
        show("trainer let go")
        await client.wake()
        await client.update_weights(str(trainer.folder), str(version + 1))
        await client.resume()
        show("engine awake")
        rewards = [rollout.reward for rollout in rollouts if rollout.reward is not None]
        (weights,) = {info.weight_version for info in (await client.engine()).values()}
        print(
            f"  reward {sum(rewards) / len(rewards):.2f} of {len(rewards)} episodes, {update.tokens} tokens "
            f"trained, weights {weights} now",
            flush=True,
        )


async def run(settings: argparse.Namespace, out: Path) -> None:
    options = ["--sandbox", settings.sandbox, "--durability", "process"]
    trainer = Trainer(settings.model, out, settings.seed)
    with tempfile.TemporaryDirectory(prefix="turnstile-turns-") as work:
        at = {"engine": settings.engine, "engine_url": settings.engine_url}
        async with (
            serve(settings.model, Path(work) / "data", **at, options=options) as server,
            AsyncClient(server.control_url, key=server.control_key) as client,
        ):
            await take_turns(client, trainer, embedded_engine(server.pid), settings)


def main() -> int:
    parser = argparse.ArgumentParser(description="A trainer and an engine take turns on one machine.")
    parser.add_argument("out", type=Path, help="folder for the weights of every round")
    parser.add_argument("--model", type=Path, default=TINY, help="Hugging Face folder (default: the tiny policy)")
    parser.add_argument("--sandbox", default="auto", help="auto, docker or local")
    parser.add_argument("--engine", default="embedded", help="embedded, sglang or vllm")
    parser.add_argument("--engine-url", help="of a running engine that reads OUT under the same path")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--groups", type=int, default=2, help="errands per round")
    parser.add_argument("--group-size", type=int, default=4, help="episodes per errand")
    parser.add_argument("--seed", type=int, default=1)
    settings = parser.parse_args()
    disable_progress_bar()  # type: ignore[no-untyped-call]
    if settings.out.exists():
        parser.error(f"{settings.out} exists: name a new folder, or remove it")
    settings.out.mkdir(parents=True)
    torch.set_num_threads(1)
    return exit_code_of(run(settings, settings.out.resolve()), CannotTakeTurns)


if __name__ == "__main__":
    run_program(main)
