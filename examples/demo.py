"""The main job in one run: tasks in, graded token-exact episodes out. `make demo`.

1. A tiny random-weight model is made (or found in .cache) and `turnstile serve` is started on it, with the sandbox
   that this machine has (Docker with a fitting image, else bubblewrap).
2. Every task that ships with Turnstile is given to the agent `tool-loop`, each in a sandbox of its own. The model
   is noise, so nothing is solved; tokens, tools, sandboxes, hidden tests and rewards are real.
3. One task is played by a scripted policy: it says the task's known solution, with the log-probabilities that the
   model gives it, behind the same engine seam. The hidden tests then give reward 1.
4. `turnstile audit --all` scores all recorded tokens again on the engine.
5. Everything is stopped, and it is checked that nothing is left running.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import sys
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from audited import TOLERANCE, DemoError, audit, leaves
from local import LocalServer, LocalServerError, serve, tiny_model
from scripted.gold import gold_script
from scripted_policy import scripted_policy
from turnstile import AsyncClient, Rollout, TurnstileError
from turnstile.models import AuditReport, TaskInfo
from turnstile_server.errors import TurnstileError as ServerError
from turnstile_server.tasks.loader import load_tasks

AGENT = "tool-loop"
LIMITS = {"max_turns": 4, "max_completion_tokens": 96, "wall_s": 300.0}
"""Of the noise: it never solves anything, so a few turns show as much as many."""
GOLD_LIMITS = {"wall_s": 300.0}


@contextlib.asynccontextmanager
async def opened(
    model: Path, folder: Path, options: list[str], engine_url: str | None = None
) -> AsyncIterator[tuple[LocalServer, AsyncClient]]:
    async with (
        serve(model, folder, engine_url=engine_url, options=options) as server,
        AsyncClient(server.control_url, key=server.control_key) as client,
    ):
        yield server, client


async def play(
    client: AsyncClient,
    tasks: list[TaskInfo],
    limits: dict[str, float],
    arguments: argparse.Namespace,
    console: Console,
) -> list[Rollout]:
    """One rollout of every task. They come as they end."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    rollouts = []
    with Progress(*columns, console=console, transient=True) as progress:
        bar = progress.add_task("episodes", total=len(tasks))
        options = {"max_concurrent": arguments.max_concurrent, "limits": limits}
        async for rollout in client.rollouts(tasks, agent=AGENT, **options):
            rollouts.append(rollout)
            progress.advance(bar)
    return rollouts


def check(rollout: Rollout, report: AuditReport | None) -> None:
    """What must hold for every rollout. Raises DemoError."""
    episode, samples = rollout.episode, rollout.samples
    if rollout.failed or episode is None or samples is None:
        raise DemoError(f"{rollout.task.id} failed: {rollout.error}")
    if rollout.reward is None:
        raise DemoError(f"{rollout.task.id} was not graded")
    stats = samples.stats
    trained = sum(int(sample.loss_mask.sum()) for sample in samples.samples)
    untrained = sum(entry.tokens for entry in samples.untrained)
    if not stats.turns or trained + untrained != stats.sampled_tokens:
        raise DemoError(
            f"{rollout.task.id}: {stats.sampled_tokens} tokens sampled, {trained} trained + {untrained} not"
        )
    scored = [turn for turn in report.turns if turn.max_abs_delta is not None] if report else []
    if len(scored) != stats.turns or max(turn.max_abs_delta or 0.0 for turn in scored) >= TOLERANCE:
        raise DemoError(f"{rollout.task.id}: the engine gives other logprobs than were recorded")


def table_of(rows: list[tuple[str, Rollout, AuditReport | None]]) -> Table:
    table = Table(box=SIMPLE_HEAD)
    table.add_column("task", no_wrap=True)
    table.add_column("policy", no_wrap=True)
    for column in ("turns", "tokens", "reward", "seconds"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("breaks")
    for policy, rollout, _ in rows:
        assert rollout.samples is not None
        stats = rollout.samples.stats
        breaks = ", ".join(f"{reason} {count}" for reason, count in sorted(stats.breaks.items())) or "none"
        reward = "-" if rollout.reward is None else f"{rollout.reward:g}"
        counts = (str(stats.turns), str(stats.sampled_tokens), reward, f"{rollout.seconds:.1f}")
        table.add_row(rollout.task.id, policy, *counts, breaks)
    return table


def audit_line(rows: list[tuple[str, Rollout, AuditReport | None]]) -> str:
    turns = [turn.max_abs_delta for _, _, report in rows if report for turn in report.turns]
    distances = [distance for distance in turns if distance is not None]
    return (
        f"Audit: {len(distances)} of {len(turns)} turns scored again by the engine; "
        f"recorded logprobs are off by {max(distances):.1e} nats at most."
    )


async def demo(arguments: argparse.Namespace, console: Console, work: Path) -> None:
    model = arguments.model or tiny_model()
    for name in ("noise", "gold"):
        work.joinpath(name).mkdir()
    options = ["--sandbox", arguments.sandbox]
    rows: list[tuple[str, Rollout, AuditReport | None]] = []
    async with opened(model, work / "noise" / "data", options) as (server, client):
        console.print(f"Model: {model.name}. Engine: embedded. Sandboxes: {server.sandboxes}. Agent: {AGENT}.")
        tasks = [task async for task in client.tasks()]
        rollouts = await play(client, tasks[: arguments.tasks], LIMITS, arguments, console)
        reports = await audit(server)
        rows += [("the model", rollout, reports.get(_episode_id(rollout))) for rollout in rollouts]
    gold = next((task for task in tasks if task.id == arguments.gold), None)
    if gold is None:
        raise DemoError(f"there is no task {arguments.gold}; there are {', '.join(task.id for task in tasks)}")
    script = gold_script(load_tasks(()))
    async with (
        scripted_policy(model, script) as engine_url,
        opened(model, work / "gold" / "data", options, engine_url) as (server, client),
    ):
        (rollout,) = await play(client, [gold], GOLD_LIMITS, arguments, console)
        reports = await audit(server)
        rows.append(("scripted", rollout, reports.get(_episode_id(rollout))))
    for _, rollout, report in rows:
        check(rollout, report)
    console.print(table_of(rows))
    console.print(audit_line(rows))
    if rows[-1][1].reward != 1.0:
        raise DemoError(f"the known solution of {gold.id} earned {rows[-1][1].reward}")
    console.print(
        "Passed: every token accounted for, audit passed, the known solution earned 1, nothing left running."
    )


def _episode_id(rollout: Rollout) -> str:
    return rollout.episode.episode_id if rollout.episode is not None else ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, help="Hugging Face folder (default: the tiny model)")
    parser.add_argument("--sandbox", default="auto", help="auto, docker or local")
    parser.add_argument("--tasks", type=int, help="the first N tasks only")
    parser.add_argument("--gold", default="fix-calculator", help="the task whose solution is played")
    parser.add_argument("--max-concurrent", type=int, default=2)
    arguments = parser.parse_args()
    console = Console()
    failed = []
    with tempfile.TemporaryDirectory(prefix="turnstile-demo-") as work:
        try:
            asyncio.run(demo(arguments, console, Path(work)))
        except* (DemoError, LocalServerError, TurnstileError, ServerError) as errors:
            failed = leaves(errors)
    for error in failed:
        console.print(f"Failed: {error}", style="bold red", markup=False, soft_wrap=True)
    return 1 if failed else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
