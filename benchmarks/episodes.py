"""Measures whole light episodes: bubblewrap, an agent, three turns with tools, grading by hidden tests.

    python benchmarks/episodes.py [--agent NAME] [--at-once N …] [--open N] [--before FILE] [--write-docs]

The server is a process of its own, with a mock engine that answers at once. Three measurements:

1. *What it costs*: episodes one after another; CPU seconds of the server and of all processes that it starts, by a
   control group, and by what they are.
2. *How many*: episodes at once, for each of ``--at-once``: episodes per second, CPU seconds, seconds of a phase.
3. *How much memory*: the engine holds ``--open`` episodes in their first model call; the server's resident memory
   while they are open and after they have ended.

``--before`` puts the figures of an earlier ``--out`` beside those of this run. Needs Linux, root (for the control
group), bubblewrap. Exit code 1: an episode did not end with the reward 1.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx

from campaign.proc import status_field
from episodes_parts.cpu import ROLES, Looker, NoControlGroups
from episodes_parts.stage import PHASES, EpisodeFailure, PlayedEpisode, Stage
from gate_parts import report

HERE = Path(__file__).resolve().parent
DOCS = HERE.parent / "docs" / "performance.md"
START_MARK, END_MARK = "<!-- benchmarks/episodes.py writes from here -->", "<!-- to here, episodes -->"
EVERY_S = 5.0

Figures = dict[str, Any]


async def cost(stage: Stage, episodes: int) -> Figures:
    """CPU seconds per episode, by role."""
    async with stage.client() as client:
        for _ in range(2):
            await stage.play(client)
        with Looker(stage.account, stage.pid) as looker:
            played = [await stage.play(client) for _ in range(episodes)]
    roles = {role: seconds / episodes for role, seconds in looker.roles().items()}
    return {"episodes": episodes, "cpu_s": roles, "phases": medians(played)}


async def at_once(stage: Stage, slots: int, episodes: int) -> Figures:
    left = iter(range(episodes))
    played: list[PlayedEpisode] = []

    async def slot(client: httpx.AsyncClient) -> None:
        for _ in left:
            played.append(await stage.play(client))

    cpu, began = stage.account.seconds(), time.monotonic()
    async with stage.client() as client, asyncio.TaskGroup() as group:
        for _ in range(slots):
            group.create_task(slot(client))
    took = time.monotonic() - began
    return {
        "at_once": slots,
        "episodes": episodes,
        "per_s": episodes / took,
        "cpu_s": (stage.account.seconds() - cpu) / episodes,
        "phases": medians(played),
    }


async def open_episodes(stage: Stage, episodes: int, idle_s: float) -> list[Figures]:
    """The server's memory: before, while all are open, after."""
    moments: list[Figures] = []
    began = time.monotonic()

    def note(what: str) -> None:
        memory = status_field(stage.pid, "VmRSS") / 1024
        moments.append({"what": what, "at_s": time.monotonic() - began, "memory_mb": memory})

    note("before")
    await stage.hold()
    async with stage.client() as client, asyncio.TaskGroup() as group:
        playing = [group.create_task(stage.play(client)) for _ in range(episodes)]
        while await stage.running() < episodes and not any(one.done() for one in playing):  # noqa: ASYNC110
            await asyncio.sleep(1.0)
        until = time.monotonic() + idle_s
        note("all open")
        while time.monotonic() < until:
            await asyncio.sleep(EVERY_S)
            note("open and idle")
        await stage.release()
    note("all ended")
    await asyncio.sleep(idle_s / 2)
    note("later")
    return moments


def medians(played: list[PlayedEpisode]) -> dict[str, float]:
    return {name: statistics.median(one.phases.get(name, 0.0) for one in played) for name in PHASES}


async def measured(options: argparse.Namespace, folder: Path) -> Figures:
    """Prints each measurement as it comes. SIGTERM ends it, its processes with it."""
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    most = max([*options.at_once, options.open, 1])
    figures: Figures = {}
    failed: tuple[BaseException, ...] = ()
    async with Stage(folder, options.installs, agent=options.agent, at_once=most) as stage:
        try:
            figures["cost"] = await cost(stage, options.episodes)
            print(json.dumps(figures["cost"]), file=sys.stderr)
            figures["at_once"] = []
            for slots in options.at_once:
                figures["at_once"].append(await at_once(stage, slots, options.each * slots))
                print(json.dumps(figures["at_once"][-1]), file=sys.stderr)
            if options.open:
                figures["open"] = await open_episodes(stage, options.open, options.idle_s)
        except* EpisodeFailure as failures:
            failed = failures.exceptions
        if failed:
            raise SystemExit(f"{failed[0]}\n{stage.log}")
    return figures


def columns(run: Figures | None, now: Figures) -> list[tuple[str, Figures]]:
    return [("before", run), ("now", now)] if run else [("now", now)]


def tables(before: Figures | None, now: Figures) -> list[str]:
    runs = columns(before, now)
    head = [*ROLES, "all"]
    lines = ["| CPU s of an episode | " + " | ".join(head) + " |", "|---" + "|---:" * len(head) + "|"]
    for name, run in runs:
        lines.append(f"| {name} | " + " | ".join(f"{run['cost']['cpu_s'][role]:.3f}" for role in head) + " |")
    lines += ["", "| at once | | episodes/s | CPU s | " + " | ".join(f"{name} s" for name in PHASES) + " |"]
    lines.append("|---:|---" + "|---:" * (2 + len(PHASES)) + "|")
    for at, row in enumerate(now["at_once"]):
        for name, run in runs:
            one = run["at_once"][at] if at < len(run["at_once"]) else None
            if one is None or one["at_once"] != row["at_once"]:
                continue
            cells = [f"{one['per_s']:.2f}", f"{one['cpu_s']:.2f}"]
            cells += [f"{one['phases'][phase]:.2f}" for phase in PHASES]
            lines.append(f"| {one['at_once']} | {name} | " + " | ".join(cells) + " |")
    for name, run in runs:
        if run.get("open"):
            lines += ["", f"| open at once, {name} | seconds | memory of the server, MB |", "|---|---:|---:|"]
            moments = run["open"]
            idle = [one for one in moments if one["what"] == "open and idle"]
            kept = [one for one in moments if one["what"] != "open and idle" or one is idle[-1]]
            lines += [f"| {one['what']} | {one['at_s']:.0f} | {one['memory_mb']:.0f} |" for one in kept]
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--agent", default="tool-loop")
    parser.add_argument("--episodes", type=int, default=16, help="one after another, for what they cost")
    parser.add_argument("--at-once", type=int, nargs="*", default=[1, 8, 64])
    parser.add_argument("--each", type=int, default=2, help="episodes for each of those at once")
    parser.add_argument("--open", type=int, default=256, help="held open together; 0: none")
    parser.add_argument("--idle-s", type=float, default=60.0, help="for which they stay open")
    parser.add_argument("--installs", type=Path, default=HERE.parent / ".cache" / "episodes-agents")
    parser.add_argument("--out", type=Path, help="file for the figures, as JSON")
    parser.add_argument("--before", type=Path, help="the figures of an earlier run")
    parser.add_argument("--write-docs", action="store_true", help="put the tables into docs/performance.md")
    options = parser.parse_args()
    load = os.getloadavg()[0]
    try:
        with tempfile.TemporaryDirectory(prefix="ep-") as name:
            now = asyncio.run(measured(options, Path(name)))
    except NoControlGroups as error:
        print(error, file=sys.stderr)
        return 1
    day = time.strftime("%Y-%m-%d")
    now["heading"] = f"{report.machine()}; load average before the run {load:.1f}; {day}; {options.agent}."
    before = json.loads(options.before.read_text()) if options.before else None
    text = "\n".join([now["heading"], "", *tables(before, now)])
    print(text)
    if options.out:
        options.out.write_text(json.dumps(now, indent=1))
    if options.write_docs:
        report.write_docs(DOCS, text, START_MARK, END_MARK)
    return 0


if __name__ == "__main__":
    sys.exit(main())
