"""Agents that you run yourself: a server that records them, samples, an audit.

1. A tiny random-weight model is made (or found in .cache) and `turnstile serve` is started on it.
2. For each episode: an external episode is created, an agent process gets its URL and key and works on a copy of
   a small git repository, and the episode is finished. The agent knows nothing of Turnstile.
3. The samples are fetched and every sampled token is accounted for.
4. `turnstile audit --all` scores the recorded tokens again on the engine.
5. Everything is stopped, and it is checked that nothing is left running.

The model's answers are nonsense; everything else is what a training run uses. With `--engine-url` the same runs
on a real SGLang server that serves `--model`.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from agents import AGENTS, AgentError, Job, make_repository, run_agent
from local import tiny_model
from turnstile import AsyncClient, TurnstileError
from turnstile.models import AuditReport, Episode, EpisodeStatus, SampleSet
from turnstile_server.demo.checks import DemoError, audit, check_samples, leaves
from turnstile_server.demo.local_server import LocalServerError, interrupt_on_termination, serve

TASK = "One test of this repository fails. Find out why and mend the code."
COMPLETION_TOKENS = 96
POLL_S = 0.5


@dataclass(frozen=True)
class Outcome:
    episode: Episode
    samples: SampleSet
    seconds: float


async def run_episode(
    client: AsyncClient, arguments: argparse.Namespace, index: int, work: Path, on_turns: Callable[[int], None]
) -> Outcome:
    """One episode from its creation to its samples. Every second agent streams its calls."""
    started = time.monotonic()
    repo = make_repository(work / f"repo-{index}")
    limits = {"max_completion_tokens": COMPLETION_TOKENS}
    async with await client.create_episode(TASK, episode_id=f"external-{index + 1}", limits=limits) as episode:
        assert episode.episode_key is not None
        job = Job(TASK, repo, episode.model_url, episode.episode_key, arguments.turns, stream=index % 2 == 1)
        async with asyncio.TaskGroup() as group:
            agent = group.create_task(run_agent(arguments.agent, job))
            while not agent.done():
                await asyncio.wait([agent], timeout=POLL_S)
                on_turns((await episode.status()).stats.turns)
        ended = await episode.finish()
        return Outcome(ended, await episode.samples(), time.monotonic() - started)


def check(outcome: Outcome, report: AuditReport | None) -> None:
    """Check what must hold for every episode. Raises DemoError."""
    name = outcome.episode.episode_id
    if outcome.episode.status is not EpisodeStatus.COMPLETED:
        raise DemoError(f"{name} is {outcome.episode.status}: {outcome.episode.error}")
    check_samples(name, outcome.samples, report)


def table_of(outcomes: list[Outcome], reports: dict[str, AuditReport]) -> Table:
    table = Table(box=SIMPLE_HEAD)
    table.add_column("episode", no_wrap=True)
    for column in ("turns", "sampled", "trained", "seconds", "max |Δlogprob|"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("breaks")
    for outcome in outcomes:
        stats, report = outcome.samples.stats, reports.get(outcome.episode.episode_id)
        distance = "-" if report is None or report.max_abs_delta is None else f"{report.max_abs_delta:.1e}"
        breaks = ", ".join(f"{reason} {count}" for reason, count in sorted(stats.breaks.items())) or "none"
        counts = (stats.turns, stats.sampled_tokens, stats.trained_tokens)
        table.add_row(outcome.episode.episode_id, *map(str, counts), f"{outcome.seconds:.1f}", distance, breaks)
    return table


async def record(arguments: argparse.Namespace, console: Console, work: Path) -> None:
    model = arguments.model or tiny_model()
    console.print(
        f"Model: {model.name}. Engine: {arguments.engine_url or arguments.engine}. Agent: {arguments.agent}."
    )
    async with (
        serve(model, work / "data", engine_url=arguments.engine_url, engine=arguments.engine) as server,
        AsyncClient(server.control_url, key=server.control_key) as client,
    ):
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        slots = asyncio.Semaphore(arguments.max_concurrent)
        with Progress(*columns, console=console) as progress:

            async def run(index: int) -> Outcome:
                async with slots:
                    bar = progress.add_task(f"episode {index + 1}: turns", total=arguments.turns)
                    return await run_episode(
                        client, arguments, index, work, lambda turns: progress.update(bar, completed=turns)
                    )

            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(run(index)) for index in range(arguments.episodes)]
        outcomes = [task.result() for task in tasks]
        reports = await audit(client)
        console.print(table_of(outcomes, reports))
        for outcome in outcomes:
            check(outcome, reports.get(outcome.episode.episode_id))
    console.print("Passed: every token accounted for, audit passed, nothing left running.")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, help="Hugging Face folder (default: the tiny model)")
    parser.add_argument(
        "--engine-url", help="a running SGLang that serves --model, in place of the embedded engine"
    )
    parser.add_argument(
        "--engine", choices=("embedded", "sglang", "vllm"), default="embedded", help="what runs at --engine-url"
    )
    parser.add_argument("--agent", choices=sorted(AGENTS), default="bash")
    parser.add_argument("--episodes", type=int, default=4)
    parser.add_argument("--max-concurrent", type=int, default=2)
    parser.add_argument("--turns", type=int, default=8, help="model calls per episode")
    arguments = parser.parse_args()
    console = Console()
    failed = []
    with tempfile.TemporaryDirectory(prefix="turnstile-external-") as work:
        try:
            asyncio.run(record(arguments, console, Path(work)))
        except* (DemoError, AgentError, LocalServerError, TurnstileError) as errors:
            failed = leaves(errors)
    for error in failed:
        console.print(f"Failed: {error}", style="bold red", markup=False)
    return 1 if failed else 0


if __name__ == "__main__":
    interrupt_on_termination()
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
