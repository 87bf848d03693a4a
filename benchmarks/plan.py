"""Holds ``turnstile plan`` against what runs: a kind is measured with few episodes at once, then many are played.

    python benchmarks/plan.py [--few 4] [--many 16] [--reply-s 2.5] [--write-docs]

Whole light episodes (bubblewrap, an agent, three turns with tools, hidden tests), with a mock engine that takes
``--reply-s`` seconds for a reply, as a model does. ``--few`` at once are played, and ``turnstile.sizing`` takes
their means for the kind; from these it foretells what ``--many`` at once do: episodes and tokens a second, those
with a place, works judged at once. Then so many are played, each slot anew as one ends, and the same is measured
between the first and the last quarter of their ends. Exit code 1: a figure is off by more than ``MOST_OFF``.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from episodes_parts.stage import EpisodeFailure, Stage
from gate_parts.report import write_docs
from turnstile.models import EpisodeSummary, EpisodeSummaryPage
from turnstile.sizing import Capacities, EpisodeKind, FleetPlan, kind_of, plan

HERE = Path(__file__).resolve().parent
DOCS = HERE.parent / "docs" / "cluster.md"
START_MARK, END_MARK = "<!-- benchmarks/plan.py writes from here -->", "<!-- to here, plan -->"
MOST_OFF = 0.2
"""Of what was measured."""
LOOK_S = 0.25


@dataclass
class Played:
    """What was seen while episodes were played: ``ends`` and looks (working, judged), each with its moment."""

    ends: list[float] = field(default_factory=list)
    looks: list[tuple[float, int, int]] = field(default_factory=list)


async def play(stage: Stage, slots: int, episodes: int) -> Played:
    """Raises EpisodeFailure in a group."""
    left, played = iter(range(episodes)), Played()

    async def slot(client: httpx.AsyncClient) -> None:
        for _ in left:
            await stage.play(client)
            played.ends.append(time.monotonic())

    async def look(client: httpx.AsyncClient) -> None:
        while True:
            load = (await client.get("/load")).json()
            judged = load["grading"] - load["gradings_waiting"]
            played.looks.append((time.monotonic(), load["running"], judged))
            await asyncio.sleep(LOOK_S)

    async with stage.client() as client, asyncio.TaskGroup() as group:
        looking = group.create_task(look(client))
        async with asyncio.TaskGroup() as playing:
            for _ in range(slots):
                playing.create_task(slot(client))
        looking.cancel()
    return played


async def summaries(stage: Stage, newest: int) -> tuple[EpisodeSummary, ...]:
    async with stage.client() as client:
        answer = await client.get("/episodes", params={"view": "summary", "limit": newest})
        return EpisodeSummaryPage.model_validate_json(answer.raise_for_status().content).summaries


def figures(played: Played, kind: EpisodeKind) -> dict[str, float]:
    """What was measured between the first and the last quarter of the ends, by the names of ``FleetPlan``."""
    ends = sorted(played.ends)
    first, last = len(ends) // 4, 3 * len(ends) // 4
    rate = (last - first) / (ends[last] - ends[first])
    looks = [look for look in played.looks if ends[first] <= look[0] <= ends[last]]
    return {
        "episodes_s": rate,
        "tokens_s": rate * kind.sampled_tokens,
        "working": statistics.fmean(look[1] for look in looks),
        "gradings": statistics.fmean(look[2] for look in looks),
    }


def table(
    foretold: FleetPlan, seen: dict[str, float], kind: EpisodeKind, options: argparse.Namespace
) -> list[str]:
    heads = {"episodes_s": "episodes/s", "tokens_s": "tokens/s", "working": "with a place", "gradings": "judged"}
    return [
        f"{os.cpu_count()} cores; {time.strftime('%Y-%m-%d')}; measured with {options.few} at once: "
        f"{kind.total_s:.1f} s each; then {options.many} at once.",
        "",
        "| | foretold | measured | off by |",
        "|---|---:|---:|---:|",
        *(
            f"| {head} | {before:.2f} | {seen[name]:.2f} | {off(before, seen[name]):.0%} |"
            for name, head in heads.items()
            for before in (getattr(foretold, name),)
        ),
    ]


def off(foretold: float, seen: float) -> float:
    return abs(foretold - seen) / seen


async def measured(options: argparse.Namespace, folder: Path) -> tuple[FleetPlan, dict[str, float], EpisodeKind]:
    async with Stage(
        folder, options.installs, agent="tool-loop", at_once=options.many, reply_s=options.reply_s
    ) as stage:
        try:
            await play(stage, options.few, options.few)  # what the first ones install and import
            few = 4 * options.few
            await play(stage, options.few, few)
            kind = kind_of(await summaries(stage, few))
            played = await play(stage, options.many, 6 * options.many)
        except* EpisodeFailure as failures:
            raise SystemExit(f"{failures.exceptions[0]}\n{stage.log}") from failures
    return plan(options.many, kind, Capacities()), figures(played, kind), kind


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--few", type=int, default=4, help="episodes at once from which the kind is measured")
    parser.add_argument("--many", type=int, default=16, help="episodes at once that are foretold and played")
    parser.add_argument("--reply-s", type=float, default=2.5, help="seconds of a model's reply")
    parser.add_argument("--installs", type=Path, default=HERE.parent / ".cache" / "episodes-agents")
    parser.add_argument("--write-docs", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="plan-") as name:
        foretold, seen, kind = asyncio.run(measured(options, Path(name)))
    lines = table(foretold, seen, kind, options)
    print("\n".join(lines))
    if options.write_docs:
        write_docs(DOCS, "\n".join(lines), START_MARK, END_MARK)
    return int(any(off(getattr(foretold, name), value) > MOST_OFF for name, value in seen.items()))


if __name__ == "__main__":
    sys.exit(main())
