"""Output of ``turnstile run``: a progress bar, files, a table, a summary."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from turnstile.cli.output import USAGE, Column, fail, show_table
from turnstile.exporters.formats import JOURNAL
from turnstile.exporters.registry import export_format, writer_of
from turnstile.exporters.sample_files import atomic_write
from turnstile.groups import short_groups
from turnstile.models import EpisodeStats, Fault
from turnstile.rollout import Rollout, RolloutProgress

EPISODES_FILE = "episodes.jsonl"
SAMPLES_FOLDER = "samples"
JOURNAL_FOLDER = "journal"
RUNS_FOLDER = Path("turnstile-runs")
"""Where runs are kept that name no folder."""
_TITLE = 22
_REASON = 400
"""Characters of a reason that are shown; all of it is in episodes.jsonl."""


def new_run_folder(run_id: str) -> Path:
    """A folder for a run that names none: after the run, with a number where there is one already."""
    number, folder = 1, RUNS_FOLDER / run_id
    while folder.exists():
        number += 1
        folder = RUNS_FOLDER / f"{run_id}-{number}"
    return folder


class RolloutFiles:
    """``OUT/episodes.jsonl``, a line per rollout, ``OUT/samples/EPISODE.*``, and ``OUT/journal/EPISODE.tsj``: all
    that the server recorded, for ``turnstile ui OUT``.

    A rollout is written when it ends, its samples first: however the run ends, each line's samples exist.
    """

    def __init__(self, out: Path, format_: str) -> None:
        self.folder = out
        self._lines = out / EPISODES_FILE
        self._samples = out / SAMPLES_FOLDER
        self._journal = out / JOURNAL_FOLDER
        self._write = writer_of(format_)
        self._suffix = export_format(format_).suffix

    def prepare(self) -> None:
        """Ends the command where the folder has a run already: two runs are not mixed."""
        if self._lines.exists():
            fail(f"{self._lines} is there already; name another --out", USAGE)
        self._samples.mkdir(parents=True, exist_ok=True)
        self._journal.mkdir(exist_ok=True)

    def add(self, rollout: Rollout, recorded: bytes | None = None) -> None:
        """``recorded``: the records of its episode; None where the server did not give them."""
        if recorded is not None and rollout.episode is not None:
            with atomic_write(self._journal / f"{rollout.episode.episode_id}{JOURNAL.suffix}") as file:
                file.write(recorded)
        if rollout.samples is not None and rollout.episode is not None:
            with atomic_write(self._samples / f"{rollout.episode.episode_id}{self._suffix}") as file:
                self._write([rollout.samples], file)
        with self._lines.open("a", encoding="utf-8") as lines:
            lines.write(json.dumps(rollout.as_json()) + "\n")


class Bar:
    """The progress bar, on stderr."""

    def __init__(self, total: int, title: str = "rollouts") -> None:
        state = TextColumn("{task.fields[state]}")
        self._progress = Progress(
            TextColumn(title, markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            state,
            TimeElapsedColumn(),
            console=Console(stderr=True),
        )
        self._task = self._progress.add_task("rollouts", total=total, state="")

    @contextmanager
    def shown(self) -> Iterator[None]:
        with self._progress:
            yield

    def update(self, now: RolloutProgress) -> None:
        parts = [f"{now.running} running"]
        parts += [
            f"{count} {name}"
            for count, name in (
                (now.waiting, "waiting"),
                (now.retried, "retried"),
                (now.regraded, "regraded"),
                (now.refilled, "refilled"),
                (now.stale, "stale"),
            )
            if count
        ]
        parts += [f"{now.failed} failed"]
        if now.mean_reward is not None:
            parts.append(f"reward {now.mean_reward:.3f}")
        self._progress.update(self._task, completed=now.done, state=", ".join(parts))


def show_rollouts(rollouts: list[Rollout]) -> None:
    """Groups together, numbered in the order in which they first ended; their ids are in episodes.jsonl."""
    numbers: dict[str, int] = {}
    for rollout in rollouts:
        numbers.setdefault(rollout.group_id, len(numbers) + 1)
    columns = [
        Column("task"),
        Column("group", "number"),
        Column("status", "text"),
        Column("turns", "number"),
        Column("tokens", "number"),
        Column("trained", "number"),
        Column("breaks", "text", optional=True),
        Column("reward", "number"),
        Column("s", "number"),
    ]
    rows = []
    for rollout in sorted(rollouts, key=lambda each: (numbers[each.group_id], each.index)):
        stats = _stats(rollout)
        rows.append(
            [
                rollout.task.id or _title(rollout.task.instruction or ""),
                str(numbers[rollout.group_id]),
                _status(rollout),
                str(stats.turns),
                str(stats.sampled_tokens),
                f"{stats.trained_share:.0%}" if stats.sampled_tokens else "-",
                ", ".join(f"{reason}: {count}" for reason, count in sorted(stats.breaks.items())),
                "-" if rollout.reward is None else f"{rollout.reward:.3g}",
                f"{rollout.seconds:.1f}",
            ]
        )
    show_table(columns, rows)


def summary(rollouts: list[Rollout]) -> str:
    """One paragraph. The mean is over graded rollouts only; failures are counted by fault, an agent's that cost it
    the reward among them."""
    rewards = [rollout.reward for rollout in rollouts if rollout.reward is not None]
    mean = f"mean reward {sum(rewards) / len(rewards):.3f}" if rewards else "no reward"
    faults = Counter(_fault(rollout) for rollout in rollouts if _went_wrong(rollout))
    failed = ", ".join(f"{name} {count}" for name, count in sorted(faults.items())) or "none"
    sampled = sum(_stats(rollout).sampled_tokens for rollout in rollouts)
    trained = sum(_stats(rollout).trained_tokens for rollout in rollouts)
    share = f"{trained / sampled:.1%} of {sampled} sampled tokens trained" if sampled else "no token sampled"
    hosted = {rollout.episode.upstream for rollout in rollouts if rollout.episode is not None} - {None}
    if hosted:
        counted = sum(_stats(rollout).upstream.get("completion_tokens", 0) for rollout in rollouts)
        share = f"{counted} tokens of {', '.join(sorted(map(str, hosted)))}, by its server's count; none to train"
    return f"{mean} over {len(rewards)} graded of {len(rollouts)} rollouts; failed: {failed}; {share}"


def failures(rollouts: list[Rollout]) -> list[str]:
    """A line for each different error, with its count. Errors that differ only in their end count as one."""
    said = Counter(
        f"{_fault(rollout)}: {_title(rollout.error.message, _REASON)}"
        for rollout in rollouts
        if _went_wrong(rollout) and rollout.error is not None
    )
    return [f"{count} × {reason}" for reason, count in said.most_common()]


def infrastructure(rollouts: list[Rollout], n: int) -> list[str]:
    """Lines about failures of the infrastructure that were made good, and about groups that are short of ``n``
    results. Neither is in the mean reward."""
    lines = []
    lost = sum(len(rollout.lost) for rollout in rollouts if rollout.fault is not Fault.INFRASTRUCTURE)
    if lost:
        regraded = sum(rollout.regraded for rollout in rollouts)
        lines.append(
            f"infrastructure: {lost} failures were made good: {regraded} by grading kept work again, "
            f"{lost - regraded} by running the agent again"
        )
    short = short_groups(rollouts, n)
    tasks = {rollout.group_id: rollout.task for rollout in rollouts}
    for group_id, missing in short.items():
        name = tasks[group_id].id or _title(tasks[group_id].instruction or "")
        lines.append(f"short: group {group_id} of task {name} has {n - missing} results of {n}")
    return lines


def not_the_agents(rollouts: list[Rollout]) -> int:
    """The number of rollouts that failed by the infrastructure, the set-up or their task, not by the agent."""
    return sum(rollout.fault in (Fault.INFRASTRUCTURE, Fault.TASK, Fault.SETUP) for rollout in rollouts)


def _went_wrong(rollout: Rollout) -> bool:
    return rollout.failed or rollout.fault is not None


def _fault(rollout: Rollout) -> str:
    return rollout.fault.value if rollout.fault is not None else rollout.status.value


def _status(rollout: Rollout) -> str:
    if _went_wrong(rollout) and rollout.error is not None:
        return f"{rollout.status.value}: {rollout.error.type}"
    return rollout.status.value


def _stats(rollout: Rollout) -> EpisodeStats:
    return rollout.episode.stats if rollout.episode is not None else EpisodeStats()


def _title(text: str, most: int = _TITLE) -> str:
    line = " ".join(text.split())
    return line if len(line) <= most else line[: most - 1] + "…"
