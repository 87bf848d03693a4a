"""Draws runs of `grpo.grpo`: reward on the way, held-out success before and after, what the tokens were worth.

python -m grpo.plot OUT.svg RUN… (folders with a log.jsonl, one per seed; in examples/)
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

from matplotlib import pyplot
from matplotlib.axes import Axes

SMOOTHED = 3
"""Steps that a point of the reward's curve is the mean of."""

Entries = list[dict[str, Any]]


def entries(run: Path, kind: str) -> Entries:
    lines = (json.loads(line) for line in run.joinpath("log.jsonl").read_text("utf-8").splitlines())
    return [entry for entry in lines if entry["kind"] == kind]


def summary(runs: list[Path]) -> str:
    """A row per run, then the mean over the runs with its standard error."""
    rows = ["| run | held out, before | held out, after | steps | minutes |", "|---|---|---|---|---|"]
    gains, afters = [], []
    for run in runs:
        before, after = entries(run, "held out")
        steps = entries(run, "step")
        cells = [f"{found['rate']:.1%} ± {found['standard_error']:.1%}" for found in (before, after)]
        rows.append(f"| {run.name} | {' | '.join(cells)} | {len(steps)} | {steps[-1]['seconds'] / 60:.0f} |")
        gains.append(after["rate"] - before["rate"])
        afters.append(after["rate"])
    for name, values in (("after", afters), ("gain", gains)):
        spread = statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else float("nan")
        rows.append(f"mean {name} over {len(values)} runs: {statistics.mean(values):.1%} ± {spread:.1%}")
    return "\n".join(rows)


def draw(runs: list[Path], out: Path) -> None:
    pyplot.rcParams.update({"svg.hashsalt": "turnstile", "font.size": 9, "axes.spines.top": False})
    pyplot.rcParams["axes.spines.right"] = False
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
    for number, run in enumerate(runs):
        color = pyplot.cm.viridis(0.1 + 0.7 * number / max(1, len(runs) - 1))
        _success(left, run, color)
        steps = entries(run, "step")
        right.plot([e["version"] for e in steps], [e["drift"] for e in steps], color=color, label=run.name)
        fresh = [e for e in steps if e["fresh_gap"] is not None]
        gaps = [e["fresh_gap"] for e in fresh]
        right.plot([e["version"] for e in fresh], gaps, ".", color=color, markersize=3)
    left.set(xlabel="weights (step)", ylabel="success", ylim=(0, 1), title="Success")
    left.legend(frameon=False, fontsize=8, loc="lower right")
    right.set(xlabel="weights (step)", ylabel="nats", title="Recorded − recomputed log-probability")
    right.set_yscale("symlog", linthresh=1e-6)
    right.annotate(
        "lines: mean over all rows; dots: largest on fresh weights", (0.02, 0.03), xycoords="axes fraction"
    )
    figure.savefig(out, metadata={"Date": None})
    pyplot.close(figure)


def _success(axes: Axes, run: Path, color: Any) -> None:
    steps, monitor, held_out = (entries(run, kind) for kind in ("step", "monitor", "held out"))
    rewards = [entry["reward"] for entry in steps]
    smooth = [statistics.mean(rewards[max(0, at + 1 - SMOOTHED) : at + 1]) for at in range(len(rewards))]
    axes.plot([e["version"] for e in steps], smooth, color=color, alpha=0.5, linewidth=1)
    axes.plot([e["version"] for e in monitor], [e["rate"] for e in monitor], "o", color=color, markersize=3)
    axes.errorbar(
        [e["version"] for e in held_out],
        [e["rate"] for e in held_out],
        [e["standard_error"] for e in held_out],
        fmt="D-",
        color=color,
        capsize=3,
        label=f"{run.name}: held out",
    )


def main() -> int:
    parser = argparse.ArgumentParser(description="Draws runs of GRPO.")
    parser.add_argument("out", type=Path, help="an SVG file")
    parser.add_argument("runs", type=Path, nargs="+")
    arguments = parser.parse_args()
    draw(arguments.runs, arguments.out)
    print(summary(arguments.runs))
    return 0


if __name__ == "__main__":
    sys.exit(main())
