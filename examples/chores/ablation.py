"""All runs of the ablation, seed by seed, in pieces; then the table and the figure.

    python -m chores.ablation START RUNS [--seeds 5] [--pieces 1]     plays the next pieces, of ten minutes at most
    python -m chores.ablation START RUNS --figure ablation.svg        draws what is there

RUNS/ARM-SEED is the folder of a run (chores.run). Arms of a seed start from the same weights, see the same
chores in each step and are judged by the same held-out ones; episodes are sampled anew, so two runs of one arm
differ, too.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

import numpy as np
from matplotlib import pyplot
from matplotlib.axes import Axes

from chores.arms import ARMS
from chores.pieces import UNFINISHED

Entries = list[dict[str, Any]]
COLORS: Final = dict(zip(ARMS, ("#1b6", "#d62", "#a3c", "#27b"), strict=True))
STUDENT: Final = {1: 12.71, 2: 4.30, 3: 3.18, 4: 2.78}
"""Two-sided 95 % quantiles of Student's t by degrees of freedom."""


def play(start: Path, runs: Path, seeds: int, pieces: int) -> int:
    """Plays the next ``pieces``. 0 when all runs are at their end, 75 while some are not, else what failed."""
    for seed in range(1, seeds + 1):
        for arm in ARMS:
            while True:
                if _ended(runs / f"{arm}-{seed}"):
                    break
                if not pieces:
                    return UNFINISHED
                pieces -= 1
                command = [sys.executable, "-m", "chores.run", str(start), str(runs / f"{arm}-{seed}")]
                command += ["--arm", arm, "--seed", str(seed), "--before", str(runs / f"{ARMS[0]}-{seed}")]
                code = subprocess.run(command, check=False).returncode
                if code not in (0, UNFINISHED):
                    return code
    return 0


def entries(run: Path, kind: str) -> Entries:
    log = run / "log.jsonl"
    lines = log.read_text().splitlines() if log.exists() else []
    return [entry for entry in map(json.loads, lines) if entry["kind"] == kind]


def found(runs: Path) -> dict[str, list[Path]]:
    """The runs at their end, by arm."""
    return {arm: [run for run in sorted(runs.glob(f"{arm}-*")) if _ended(run)] for arm in ARMS}


def table(runs: dict[str, list[Path]]) -> str:
    """A row for each arm: means over its seeds, with 95 % intervals of Student's t."""
    rows = [
        "| arm | seeds | solved before | after | gain | replies of other ids | gap, nats a token | KL (k1) "
        "| replies outside the clip | clipped | row tokens a step | seconds a step |",
        "|---|---:|---|---|---|---|---|---|---|---|---:|---:|",
    ]
    for arm, of_arm in runs.items():
        if not of_arm:
            rows.append(f"| {arm} | 0 |" + " |" * 10)
            continue
        held = [[entry["rate"] for entry in entries(run, "held out")] for run in of_arm]
        steps = [step for run in of_arm for step in entries(run, "step")]

        def mean(name: str, steps: Entries = steps) -> float:
            return statistics.mean(float(step[name]) for step in steps)

        gains = [after - before for before, after in held]
        cells = [
            *(_interval([rates[at] for rates in held]) for at in (0, 1)),
            _interval(gains),
            f"{mean('distance_other_ids'):.1%}",
            f"{mean('distance_gap'):.2g}",
            f"{mean('distance_kl'):.2g}",
            f"{mean('distance_outside'):.1%}",
            f"{mean('clipped'):.1%}",
            f"{mean('row_tokens'):,.0f}",
            f"{mean('play_s') + mean('train_s'):.0f}",
        ]
        rows.append(f"| {arm} | {len(of_arm)} | {' | '.join(cells)} |")
    return "\n".join(rows)


def draw(runs: dict[str, list[Path]], out: Path) -> None:
    pyplot.rcParams.update(
        {"svg.hashsalt": "turnstile", "font.size": 9, "axes.spines.top": False, "axes.spines.right": False}
    )
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
    for arm, of_arm in runs.items():
        if of_arm:
            _curve(left, arm, [entries(run, "step") for run in of_arm], "reward")
            _curve(right, arm, [entries(run, "step") for run in of_arm], "distance_gap")
    left.set(xlabel="step", ylabel="mean reward", title="Reward of the training episodes")
    right.set(xlabel="step", ylabel="nats a token", yscale="log")
    right.set_title("|log p(trained) − recorded log p(sampled)|")
    left.legend(frameon=False, fontsize=8)
    figure.savefig(out, metadata={"Date": None})
    pyplot.close(figure)


def _curve(axes: Axes, arm: str, runs: list[Entries], name: str) -> None:
    values = np.asarray([[step[name] for step in steps] for steps in runs])
    at = np.arange(1, values.shape[1] + 1)
    axes.plot(at, values.mean(0), color=COLORS[arm], label=f"{arm} ({len(runs)} seeds)")
    if len(runs) > 1:
        half = STUDENT[len(runs) - 1] * values.std(0, ddof=1) / len(runs) ** 0.5
        low, high = values.mean(0) - half, values.mean(0) + half
        axes.fill_between(at, low, high, color=COLORS[arm], alpha=0.15, linewidth=0)


def _interval(values: list[float]) -> str:
    mean = f"{statistics.mean(values):.1%}"
    if len(values) == 1:
        return mean
    return f"{mean} ± {STUDENT[len(values) - 1] * statistics.stdev(values) / len(values) ** 0.5:.1%}"


def _ended(run: Path) -> bool:
    return len(entries(run, "held out")) == 2


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("start", type=Path)
    parser.add_argument("runs", type=Path)
    parser.add_argument("--seeds", type=int, default=5, choices=range(1, 6))
    parser.add_argument("--pieces", type=int, default=1)
    parser.add_argument("--figure", type=Path, metavar="SVG", help="plays nothing: draws, and prints the table")
    arguments = parser.parse_args()
    if arguments.figure is None:
        return play(arguments.start, arguments.runs, arguments.seeds, arguments.pieces)
    runs = found(arguments.runs)
    if not any(runs.values()):
        parser.error(f"no run in {arguments.runs} is at its end")
    draw(runs, arguments.figure)
    print(table(runs))
    return 0


if __name__ == "__main__":
    sys.exit(main())
