"""The main job in one run: tasks in, graded token-exact episodes of a real agent out. `make demo`.

1. `turnstile serve` is started on the tiny policy (`tiny_policy/checkpoint`, a million parameters, on the CPU),
   with the sandbox that this machine has: Docker with a fitting image, else bubblewrap.
2. The agent `plain-loop` plays errands that the policy has never seen, several times each, every time in a
   sandbox of its own. The policy samples for itself: it solves some and fails others. Hidden tests in further
   sandboxes give the reward.
3. One solved episode is shown as a trainer gets it: what the model was fed, and what it sampled.
4. `turnstile audit --all` scores all recorded tokens again on the engine.
5. Everything is stopped, and it is checked that nothing is left running.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import sys
import tempfile
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.panel import Panel
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text
from tokenizers import Tokenizer

from audited import TOLERANCE, DemoError, audit, leaves
from local import LocalServerError, serve
from tiny_policy import CHECKPOINT
from tiny_policy.errands import Errand, errands
from turnstile import AsyncClient, Rollout, TurnstileError, by_group
from turnstile.models import AuditReport, Sample

AGENT = "plain-loop"
LIMITS = {"max_turns": 10, "max_completion_tokens": 96, "wall_s": 300.0}
LEVELS = (1, 2, 1, 3)
"""Of the errands, in turn."""
SEED = 20


async def play(
    client: AsyncClient, tasks: list[Errand], arguments: argparse.Namespace, console: Console
) -> list[Rollout]:
    """Some rollouts of every errand. They come as they end."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    rollouts = []
    with Progress(*columns, console=console, transient=True) as progress:
        bar = progress.add_task("episodes", total=len(tasks) * arguments.rollouts)
        async for rollout in client.rollouts(
            [task.task() for task in tasks],
            agent=AGENT,
            n=arguments.rollouts,
            max_concurrent=arguments.max_concurrent,
            limits=LIMITS,
        ):
            rollouts.append(rollout)
            progress.advance(bar)
    return rollouts


def check(rollout: Rollout, report: AuditReport | None) -> None:
    """What must hold for every rollout. Raises DemoError."""
    if rollout.failed or rollout.samples is None:
        raise DemoError(f"{rollout.rollout_id} failed: {rollout.error}")
    if rollout.reward is None:
        raise DemoError(f"{rollout.rollout_id} was not graded")
    stats = rollout.samples.stats
    trained = sum(int(sample.loss_mask.sum()) for sample in rollout.samples.samples)
    untrained = sum(entry.tokens for entry in rollout.samples.untrained)
    if not stats.turns or trained + untrained != stats.sampled_tokens:
        raise DemoError(
            f"{rollout.rollout_id}: {stats.sampled_tokens} tokens sampled, {trained} trained + {untrained} not"
        )
    scored = [turn for turn in report.turns if turn.max_abs_delta is not None] if report else []
    if len(scored) != stats.turns or max(turn.max_abs_delta or 0.0 for turn in scored) >= TOLERANCE:
        raise DemoError(f"{rollout.rollout_id}: the engine gives other logprobs than were recorded")


def table_of(rollouts: list[Rollout]) -> Table:
    """One row per errand."""
    table = Table(box=SIMPLE_HEAD)
    table.add_column("errand")
    for column in ("level", "rewards", "turns", "sampled", "trained", "seconds"):
        table.add_column(column, justify="right", no_wrap=True)
    for group in by_group(rollouts).values():
        stats = [rollout.samples.stats for rollout in group if rollout.samples is not None]
        sampled, trained = sum(s.sampled_tokens for s in stats), sum(s.trained_tokens for s in stats)
        rewards = " ".join("-" if rollout.reward is None else f"{rollout.reward:g}" for rollout in group)
        task = group[0].task
        level = str((task.model_extra or {})["metadata"]["level"])
        turns = f"{sum(s.turns for s in stats) / len(stats):.1f}"
        seconds = f"{sum(rollout.seconds for rollout in group) / len(group):.1f}"
        counts = (level, rewards, turns, str(sampled), f"{trained / sampled:.0%}", seconds)
        table.add_row(task.instruction, *counts)
    return table


def transcript(sample: Sample, tokenizer: Tokenizer) -> Panel:
    """A sample as text: what was sampled (mask 1) stands out from what was fed (mask 0)."""
    text = Text()
    for sampled, run in itertools.groupby(range(len(sample.input_ids)), lambda at: bool(sample.loss_mask[at])):
        ids = [int(sample.input_ids[at]) for at in run]
        style = "bold green" if sampled else "dim"
        text.append(tokenizer.decode(ids, skip_special_tokens=False), style=style)
    count, trained = len(sample.input_ids), int(sample.loss_mask.sum())
    return Panel(text, title=f"One sample: {count} tokens, {trained} of them sampled (bold)", expand=False)


def audit_line(reports: list[AuditReport]) -> str:
    turns = [turn.max_abs_delta for report in reports for turn in report.turns]
    distances = [distance for distance in turns if distance is not None]
    return (
        f"Audit: {len(distances)} of {len(turns)} turns scored again by the engine; "
        f"recorded logprobs are off by {max(distances):.1e} nats at most."
    )


async def demo(arguments: argparse.Namespace, console: Console, work: Path) -> None:
    model: Path = arguments.model
    tasks = list(itertools.islice(errands(SEED, LEVELS, held_out=True), arguments.errands))
    async with (
        serve(model, work / "data", options=["--sandbox", arguments.sandbox]) as server,
        AsyncClient(server.control_url, key=server.control_key) as client,
    ):
        console.print(f"Model: {model.name}. Engine: embedded. Sandboxes: {server.sandboxes}. Agent: {AGENT}.")
        rollouts = await play(client, tasks, arguments, console)
        reports = await audit(server)
    for rollout in rollouts:
        check(rollout, reports.get(rollout.episode.episode_id) if rollout.episode is not None else None)
    console.print(table_of(rollouts))
    solved = [rollout for rollout in rollouts if rollout.reward == 1.0]
    if solved and solved[0].samples is not None:
        tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
        console.print(transcript(solved[0].samples.samples[0], tokenizer))
    console.print(f"Solved: {len(solved)} of {len(rollouts)} episodes, by the policy's own sampling.")
    console.print(audit_line(list(reports.values())))
    if len(solved) < arguments.least * len(rollouts):
        raise DemoError(f"only {len(solved)} of {len(rollouts)} episodes were solved")
    console.print("Passed: every token accounted for, audit passed, nothing left running.")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=CHECKPOINT, help="Hugging Face folder (the tiny policy)")
    parser.add_argument("--sandbox", default="auto", help="auto, docker or local")
    parser.add_argument("--errands", type=int, default=12, help="how many")
    parser.add_argument("--rollouts", type=int, default=4, help="of each errand")
    parser.add_argument("--least", type=float, default=1 / 3, help="share of the episodes that must be solved")
    parser.add_argument("--max-concurrent", type=int, default=8)
    arguments = parser.parse_args()
    console = Console()
    failed = []
    with tempfile.TemporaryDirectory(prefix="turnstile-demo-") as work:
        try:
            asyncio.run(demo(arguments, console, Path(work)))
        except* (DemoError, LocalServerError, TurnstileError) as errors:
            failed = leaves(errors)
    for error in failed:
        console.print(f"Failed: {error}", style="bold red", markup=False, soft_wrap=True)
    return 1 if failed else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
