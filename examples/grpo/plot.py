"""Plots runs of `grpo.grpo`: rewards, held-out success before and after, agreement of log-probabilities.

python -m grpo.plot OUT.svg RUN… (folders with a log.jsonl, one per seed; in examples/)
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import pyplot
from matplotlib.axes import Axes

SMOOTHED = 3
"""Steps over which a point of the reward curve is averaged."""

TOLERANCE = 1e-4
"""Nats that few tokens in float32 exceed; drawn as a line."""

Entries = list[dict[str, Any]]


def entries(run: Path, kind: str) -> Entries:
    lines = (json.loads(line) for line in run.joinpath("log.jsonl").read_text("utf-8").splitlines())
    return [entry for entry in lines if entry["kind"] == kind]


def summary(runs: list[Path]) -> str:
    """A row per run, then the mean over the runs with its standard error."""
    rows = ["| run | held out, before | held out, after | steps | minutes |", "|---|---|---|---|---|"]
    gains, afters = [], []
    for run in runs:
        steps, held_out = entries(run, "step"), entries(run, "held out")
        if len(held_out) < 2:
            rows.append(f"| {run.name} | unfinished | | {len(steps)} | |")
            continue
        before, after = held_out
        cells = [f"{found['rate']:.1%} ± {found['standard_error']:.1%}" for found in (before, after)]
        rows.append(f"| {run.name} | {' | '.join(cells)} | {len(steps)} | {steps[-1]['seconds'] / 60:.0f} |")
        gains.append(after["rate"] - before["rate"])
        afters.append(after["rate"])
    for name, values in (("after", afters), ("gain", gains)) if len(gains) > 1 else ():
        spread = statistics.stdev(values) / len(values) ** 0.5
        rows.append(f"mean {name} over {len(values)} runs: {statistics.mean(values):.1%} ± {spread:.1%}")
    return "\n".join(rows)


def draw(runs: list[Path], out: Path) -> None:
    pyplot.rcParams.update(
        {"svg.hashsalt": "turnstile", "font.size": 9, "axes.spines.top": False, "axes.spines.right": False}
    )
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
    for color, run in zip(pyplot.cm.viridis(np.linspace(0.1, 0.8, len(runs))), runs, strict=True):
        _success(left, run, color)
        fresh = [(entry["version"], entry["fresh_gap"]) for entry in entries(run, "step") if entry["fresh_gap"]]
        right.plot([at for at, _ in fresh], [gap for _, gap in fresh], ".", color=color, label=run.name)
    left.set(xlabel="step", ylabel="solved", ylim=(0.3, 1), title="Errands solved at temperature 1")
    left.plot([], [], "-", color="grey", linewidth=1, label="training episodes")
    left.plot([], [], "o", color="grey", markersize=3, label="200 held-out errands")
    left.plot([], [], "D", color="grey", label="1000 others, looked at once")
    left.legend(frameon=False, fontsize=8, loc="lower right")
    right.axhline(TOLERANCE, color="grey", linewidth=1, linestyle="--")
    right.set(xlabel="step", ylabel="nats", ylim=(1e-7, 1e-3), yscale="log")
    right.set_title("Largest |recorded − recomputed| logprob on fresh weights", fontsize=9)
    right.legend(frameon=False, fontsize=8, loc="lower right")
    figure.savefig(out, metadata={"Date": None})
    pyplot.close(figure)


def _success(axes: Axes, run: Path, color: Any) -> None:
    steps, monitor, held_out = (entries(run, kind) for kind in ("step", "monitor", "held out"))
    rewards = [entry["reward"] for entry in steps]
    smooth = [statistics.mean(rewards[max(0, at + 1 - SMOOTHED) : at + 1]) for at in range(len(rewards))]
    axes.plot([e["version"] for e in steps], smooth, color=color, alpha=0.6, linewidth=1)
    axes.plot([e["version"] for e in monitor], [e["rate"] for e in monitor], "o", color=color, markersize=3)
    versions, rates = [e["version"] for e in held_out], [e["rate"] for e in held_out]
    errors = [e["standard_error"] for e in held_out]
    axes.errorbar(versions, rates, errors, fmt="D", color=color, capsize=3, markersize=5)


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
