"""Four times more episodes than an engine's cache holds: with a fixed limit, and with the adaptive one.

    TURNSTILE_SGLANG_PYTHON=… python benchmarks/back_pressure.py [--fits 8] [--first 3000] [--turns 8] [--rounds 2]

A real SGLang on CPU has a prefix cache of a size of our choosing. Each *episode* is what an agent does: a call, a
tool that takes a while, a call that repeats everything and adds the tool's answer. *Fits* plays as many episodes
at once as the cache holds: the best there is. *Fixed* starts four times as many, all of which get their calls
through at once. *Adaptive* starts as many, through a fleet that watches the engine's cache. All rows are measured
in turns in one run, on one server whose cache is flushed before each. Throughput is sampled tokens per second
until the last episode has ended; *found* is the share of repeated prompt tokens that the engine still had.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import anyio
import numpy as np

from fleet_parts.played import Played, call_times, flushed_fleet
from turnstile_server.demo import TINY
from turnstile_server.engines.fleet.fleet import Fleet
from turnstile_server.engines.protocol import CallOrigin, EngineSampling
from turnstile_server.errors import TurnstileError
from turnstile_server.settings import FleetSettings

sys.path[:0] = [str(Path(__file__).resolve().parents[1] / "tests")]
from sglang_server import sglang_server  # noqa: E402 - the tests' way to start a real server

TOOL_TOKENS, COMPLETION_TOKENS = 60, 16
TOOL_S = 0.3
TIMES_TOO_MANY = 4


@dataclass
class Outcome(Played):
    """``repeated``: prompt tokens of calls that had been in the call before."""

    repeated: int = 0


async def play_episode(
    fleet: Fleet, name: str, first: int, turns: int, outcome: Outcome, draw: np.random.Generator
) -> None:
    ids = draw.integers(0, 500, first, dtype=np.int32)
    sampling = EngineSampling(max_new_tokens=COMPLETION_TOKENS)
    for turn in range(turns):
        started, before = time.perf_counter(), len(ids)
        try:
            calls = fleet.generate(
                ids, sampling, rid=f"{name}.{turn}", origin=CallOrigin(name, group_since=0.0), stream=True
            )
            async for chunk in calls:
                ids = np.concatenate([ids, chunk.ids], dtype=np.int32)
                outcome.sampled += len(chunk.ids)
                if chunk.finish is not None and turn:
                    outcome.repeated += before - TOOL_TOKENS
                    outcome.found += min(chunk.finish.cached_tokens or 0, before - TOOL_TOKENS)
        except TurnstileError:
            outcome.failed += 1
            return
        outcome.waits.append(time.perf_counter() - started)
        await anyio.sleep(TOOL_S)
        ids = np.concatenate([ids, draw.integers(0, 500, TOOL_TOKENS, dtype=np.int32)], dtype=np.int32)
    fleet.forget(name)


async def play(url: str, *, episodes: int, at_once: int, first: int, turns: int, adaptive: bool) -> Outcome:
    outcome, places = Outcome(), anyio.Semaphore(at_once)
    async with flushed_fleet([url], FleetSettings(adaptive=adaptive)) as fleet:
        started = time.perf_counter()

        async def one(number: int) -> None:
            async with places:
                draw = np.random.default_rng(number)
                await play_episode(fleet, f"ep_{time.monotonic_ns()}_{number}", first, turns, outcome, draw)

        async with anyio.create_task_group() as tasks:
            for number in range(episodes):
                tasks.start_soon(one, number)
        outcome.seconds = time.perf_counter() - started
    return outcome


async def measure(url: str, fits: int, first: int, turns: int, rounds: int) -> dict[str, list[Outcome]]:
    many = TIMES_TOO_MANY * fits
    ways = {
        "fits": {"at_once": fits, "adaptive": False},
        "fixed": {"at_once": many, "adaptive": False},
        "adaptive": {"at_once": many, "adaptive": True},
    }
    found: dict[str, list[Outcome]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, way in ways.items():
            found[name].append(await play(url, episodes=many, first=first, turns=turns, **way))  # type: ignore[arg-type]
    return found


def report(found: dict[str, list[Outcome]]) -> str:
    def median(outcomes: Sequence[Outcome]) -> float:
        return statistics.median(outcome.throughput for outcome in outcomes)

    best = median(found["fits"])
    lines = [
        "| way | sampled tokens/s | of the best | found | p50 call | p99 call | failed |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, outcomes in found.items():
        share = sum(outcome.found for outcome in outcomes) / sum(outcome.repeated for outcome in outcomes)
        lines.append(
            f"| {name} | {median(outcomes):.0f} | {median(outcomes) / best:.2f} | {share:.2f} "
            f"| {call_times(outcomes)} "
            f"| {sum(outcome.failed for outcome in outcomes)} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--fits", type=int, default=8, help="episodes that the engine's cache holds")
    parser.add_argument("--first", type=int, default=3000, help="tokens of an episode's first prompt")
    parser.add_argument("--turns", type=int, default=8, help="calls of an episode")
    parser.add_argument("--rounds", type=int, default=2)
    arguments = parser.parse_args()
    length = arguments.first + arguments.turns * (TOOL_TOKENS + COMPLETION_TOKENS)
    tokens = int(arguments.fits * length * 1.1)
    with tempfile.TemporaryDirectory(), sglang_server(TINY, ["--max-total-tokens", str(tokens)]) as url:
        found = anyio.run(measure, url, arguments.fits, arguments.first, arguments.turns, arguments.rounds)
    print(f"{arguments.fits} episodes of {length} tokens fit into {tokens}.")
    print(f"{TIMES_TOO_MANY} times as many are played.\n")
    print(report(found))


if __name__ == "__main__":
    main()
