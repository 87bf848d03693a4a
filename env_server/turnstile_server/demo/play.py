"""``turnstile demo``: from tasks to graded, token-exact episodes of a real agent, in about a minute.

1. Start `turnstile serve` on the tiny policy. Sandboxes are Docker's where a fitting image is, else bubblewrap's.
2. Launch the agent `plain-loop` on errands that the policy has never seen, several times each, every time in a
   sandbox of its own. The policy samples for itself: it solves some and fails others. Hidden tests in further
   sandboxes give the reward.
3. Show one solved episode as a trainer gets it: the tokens that were fed and those that were sampled.
4. Audit every episode: the engine scores all recorded tokens again.
5. Stop everything, and check that no process stays behind.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.panel import Panel
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text
from tokenizers import Tokenizer

from turnstile import AsyncClient, Rollout, by_group
from turnstile.models import Sample
from turnstile.visible import visible
from turnstile_server.demo import model_folder
from turnstile_server.demo.checks import DemoError, audit, audit_line, check_samples, drift_line
from turnstile_server.demo.errands import Errand, errands
from turnstile_server.demo.local_server import serve

AGENT = "plain-loop"
LIMITS = {"max_turns": 10, "max_completion_tokens": 96, "wall_s": 300.0}
LEVELS = (1, 2, 1, 3)
"""Levels of the errands, in turn."""
SEED = 20


@dataclass(frozen=True, slots=True)
class DemoOptions:
    """``errands`` tasks are played ``rollouts`` times each, ``max_concurrent`` at once.

    ``least``: the share of the episodes that must be solved, else the demo fails.
    """

    model: Path = Path("tiny")
    sandbox: str = "auto"
    errands: int = 12
    rollouts: int = 4
    max_concurrent: int = 8
    least: float = 1 / 3


async def play(
    client: AsyncClient, tasks: Sequence[Errand], options: DemoOptions, console: Console
) -> list[Rollout]:
    """Play every errand several times. Returns the rollouts in the order in which they ended."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    rollouts = []
    with Progress(*columns, console=console, transient=True) as progress:
        bar = progress.add_task("episodes", total=len(tasks) * options.rollouts)
        async for rollout in client.rollouts(
            [task.task() for task in tasks],
            agent=AGENT,
            n=options.rollouts,
            max_concurrent=options.max_concurrent,
            limits=LIMITS,
        ):
            rollouts.append(rollout)
            progress.advance(bar)
    return rollouts


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
    """The sample as text: sampled tokens (mask 1) are bold, fed tokens (mask 0) are dim."""
    text = Text()
    for sampled, run in itertools.groupby(range(len(sample.input_ids)), lambda at: bool(sample.loss_mask[at])):
        ids = [int(sample.input_ids[at]) for at in run]
        style = "bold green" if sampled else "dim"
        decoded = tokenizer.decode(ids, skip_special_tokens=False)
        text.append(visible(decoded, lines=True), style=style)
    count, trained = len(sample.input_ids), int(sample.loss_mask.sum())
    return Panel(text, title=f"One sample: {count} tokens, {trained} of them sampled (bold)", expand=False)


async def demo(options: DemoOptions, console: Console, work: Path) -> None:
    """Play, check and show everything; files go to the folder ``work``.

    Raises DemoError when something that must hold does not, LocalServerError when the server fails, and the
    client's TurnstileError.
    """
    tasks = list(itertools.islice(errands(SEED, LEVELS, held_out=True), options.errands))
    async with (
        serve(options.model, work / "data", options=["--sandbox", options.sandbox]) as server,
        AsyncClient(server.control_url, key=server.control_key) as client,
    ):
        console.print(f"Model: {options.model}. Engine: embedded. Sandboxes: {server.sandboxes}. Agent: {AGENT}.")
        rollouts = await play(client, tasks, options, console)
        reports = await audit(client)
    for rollout in rollouts:
        if rollout.failed or rollout.samples is None or rollout.episode is None:
            raise DemoError(f"{rollout.rollout_id} failed: {rollout.error}")
        if rollout.reward is None:
            raise DemoError(f"{rollout.rollout_id} was not graded")
        check_samples(rollout.rollout_id, rollout.samples, reports.get(rollout.episode.episode_id))
    console.print(table_of(rollouts))
    solved = [rollout for rollout in rollouts if rollout.reward == 1.0]
    samples = [sample for rollout in rollouts if rollout.samples is not None for sample in rollout.samples.samples]
    tokenizer = Tokenizer.from_file(str(model_folder(options.model) / "tokenizer.json"))
    if samples:
        shown = next((sample for sample in samples if sample.reward == 1.0), samples[0])
        console.print(transcript(shown, tokenizer))
    console.print(f"Solved: {len(solved)} of {len(rollouts)} episodes, by the policy's own sampling.")
    console.print(audit_line(list(reports.values())))
    console.print(drift_line(samples, tokenizer))
    if len(solved) < options.least * len(rollouts):
        raise DemoError(f"only {len(solved)} of {len(rollouts)} episodes were solved")
    console.print("Passed: every token accounted for, audit passed, nothing left running.")
