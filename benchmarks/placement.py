"""Which worker an episode belongs on: by a hash of the episode, by a hash of its group, by what is in the caches.

    TURNSTILE_SGLANG_PYTHON=… python benchmarks/placement.py [--groups 4] [--first 2400] [--turns 4] [--rounds 2]

Two real SGLang on CPU, each with a prefix cache that holds a good half of the episodes that are played at once.
Each *episode* is what an agent does: a call, a tool that takes a while, a call that repeats everything and adds
the tool's answer. Groups come one after the other, and as one episode ends the next begins. In *shared* the eight
episodes of a group begin with the same prompt, as in GRPO; in *alone* no two have a prompt in common.

*episode* is what the fleet does. *group* hashes the group's name instead. *cache* sends a new episode to the
worker that has most of its prompt, and among equals to the one with the fewest calls, by a memory of what went
where that is as large as the engines' caches are; what it believed to be there and what the engines then reported
is printed below the table. All are bounded by the load factor, and leave an episode where it is once it
is placed. All take turns in one run, with emptied caches; who goes first changes from round to round. *found* is
the share of all prompt tokens that the engines had; *first* is that of the episodes' first prompts.
"""

from __future__ import annotations

import argparse
import hashlib
import statistics
import sys
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import anyio
import numpy as np

from fleet_parts.played import Played, call_times, flushed_fleet
from turnstile.models import Int32Array
from turnstile_server.demo import TINY
from turnstile_server.engines.fleet.bounds import FleetBounds
from turnstile_server.engines.fleet.fleet import Fleet
from turnstile_server.engines.fleet.placement import Placement, preference
from turnstile_server.engines.protocol import CallOrigin, EngineSampling
from turnstile_server.errors import TurnstileError
from turnstile_server.settings import FleetSettings

sys.path[:0] = [str(Path(__file__).resolve().parents[1] / "tests")]
from sglang_server import sglang_processes  # noqa: E402 - the tests' way to start a real server

WORKERS, GROUP_SIZE, AT_ONCE = 2, 8, 16
OWN_TOKENS, TOOL_TOKENS, COMPLETION_TOKENS = 40, 60, 12
TOOL_S = (0.2, 0.6)
ROOM = 0.6
"""Of the episodes that are played at once, without sharing, the share that one worker's cache holds."""
BLOCK = 64
LOADS = ("shared", "alone")


class ByGroup(Placement):
    """A group's episodes belong on one worker."""

    def order(self, origin: CallOrigin, calls: Mapping[str, int]) -> list[str]:
        return preference(origin.group or origin.episode_id, calls)


class ByCache(Placement):
    """An episode belongs where most of its prompt is; ``blocks``: those of ``BLOCK`` tokens that a worker holds.
    ``ask`` comes before each call, ``learn`` after it."""

    def __init__(self, load_factor: float, remembered: int, blocks: int) -> None:
        super().__init__(load_factor, remembered)
        self.believed = 0
        """Tokens of prompts that should have been in the caches of the workers that the calls went to."""
        self._blocks = blocks
        self._held: dict[str, OrderedDict[bytes, None]] = {}
        """Each worker's blocks, the one used last at the end."""
        self._asked: dict[str, list[bytes]] = {}
        self._at: dict[str, str] = {}

    def ask(self, episode_id: str, prompt: Int32Array) -> None:
        self._asked[episode_id] = _chain(prompt)

    def order(self, origin: CallOrigin, calls: Mapping[str, int]) -> list[str]:
        def rank(worker: str) -> tuple[int, int]:
            return -self._has(worker, self._asked[origin.episode_id]), calls[worker]

        return sorted(preference(origin.episode_id, calls), key=rank)

    def put(self, episode_id: str, worker: str) -> None:
        super().put(episode_id, worker)
        self.believed += BLOCK * self._has(worker, self._asked[episode_id])
        self._at[episode_id] = worker
        self._hold(worker, self._asked[episode_id])

    def learn(self, episode_id: str, ids: Int32Array) -> None:
        """A call ended: its prompt with what it sampled is ``ids`` (int32[n])."""
        self._hold(self._at[episode_id], _chain(ids))

    def _has(self, worker: str, chain: Sequence[bytes]) -> int:
        held = self._held.get(worker, {})
        return next((at for at, block in enumerate(chain) if block not in held), len(chain))

    def _hold(self, worker: str, chain: Sequence[bytes]) -> None:
        held = self._held.setdefault(worker, OrderedDict())
        for block in reversed(chain):  # the end of a prefix is evicted before its beginning
            held[block] = None
            held.move_to_end(block)
        while len(held) > self._blocks:
            held.popitem(last=False)


def _chain(ids: Int32Array) -> list[bytes]:
    """A name for each whole block of ``ids`` (int32[n]), that of all before it included."""
    names, digest = [], hashlib.blake2b(digest_size=16)
    for end in range(BLOCK, len(ids) + 1, BLOCK):
        digest.update(ids[end - BLOCK : end].tobytes())
        names.append(digest.copy().digest())
    return names


def placements(cache_tokens: int) -> dict[str, Callable[[], Placement]]:
    """The ways."""
    bounds = FleetBounds()
    options = (bounds.load_factor, bounds.remembered_episodes)
    return {
        "episode": lambda: Placement(*options),
        "group": lambda: ByGroup(*options),
        "cache": lambda: ByCache(*options, blocks=cache_tokens // BLOCK),
    }


@dataclass(frozen=True)
class Load:
    """What is played. ``first``: tokens of an episode's first prompt; ``shared``: its group has them in common."""

    groups: int
    first: int
    turns: int
    shared: bool


@dataclass
class Outcome(Played):
    """Counts of prompt tokens: of all calls, of first calls, of these found, and believed to be found."""

    prompts: int = 0
    firsts: int = 0
    found_first: int = 0
    believed: int = 0
    moves: int = 0


async def play_episode(fleet: Fleet, origin: CallOrigin, ids: Int32Array, turns: int, outcome: Outcome) -> None:
    name, by_cache = origin.episode_id, fleet.placement if isinstance(fleet.placement, ByCache) else None
    draw = np.random.default_rng(list(name.encode()))
    sampling = EngineSampling(max_new_tokens=COMPLETION_TOKENS)
    for turn in range(turns):
        started, asked = time.perf_counter(), len(ids)
        if by_cache is not None:
            by_cache.ask(name, ids)
        try:
            async for chunk in fleet.generate(ids, sampling, rid=f"{name}.{turn}", origin=origin, stream=True):
                ids = np.concatenate([ids, chunk.ids], dtype=np.int32)
                outcome.sampled += len(chunk.ids)
                if chunk.finish is not None:
                    cached = chunk.finish.cached_tokens or 0
                    outcome.prompts += asked
                    outcome.found += cached
                    outcome.firsts += 0 if turn else asked
                    outcome.found_first += 0 if turn else cached
        except TurnstileError:
            outcome.failed += 1
            break
        if by_cache is not None:
            by_cache.learn(name, ids)
        outcome.waits.append(time.perf_counter() - started)
        await anyio.sleep(draw.uniform(*TOOL_S))
        ids = np.concatenate([ids, draw.integers(0, 500, TOOL_TOKENS, dtype=np.int32)], dtype=np.int32)
    fleet.forget(name)


async def play(urls: Sequence[str], load: Load, placement: Placement, round_: int) -> Outcome:
    outcome, places = Outcome(), anyio.Semaphore(AT_ONCE)
    async with flushed_fleet(urls, FleetSettings(), placement) as fleet:
        started = time.perf_counter()

        async def one(group: int, member: int, since: float) -> None:
            name = f"ep_{round_}_{group}_{member}"
            own = np.random.default_rng(list(name.encode()))
            same = np.random.default_rng([round_, group]) if load.shared else own
            ids = np.concatenate(
                [same.integers(0, 500, load.first - OWN_TOKENS), own.integers(0, 500, OWN_TOKENS)], dtype=np.int32
            )
            await anyio.sleep(own.uniform(*TOOL_S))  # its sandbox starts
            await play_episode(fleet, CallOrigin(name, f"{round_}_{group}", 0, since), ids, load.turns, outcome)
            places.release()

        async with anyio.create_task_group() as tasks:
            for group in range(load.groups):
                since = anyio.current_time()
                for member in range(GROUP_SIZE):
                    await places.acquire()
                    tasks.start_soon(one, group, member, since)
        outcome.seconds = time.perf_counter() - started
    outcome.moves = placement.moves
    if isinstance(placement, ByCache):
        outcome.believed = placement.believed
    return outcome


Found = dict[tuple[str, str], list[Outcome]]


async def measure(urls: Sequence[str], loads: Mapping[str, Load], cache_tokens: int, rounds: int) -> Found:
    ways = placements(cache_tokens)
    found: Found = {(load, way): [] for load in loads for way in ways}
    warm_up = Load(1, 200, 1, shared=False)
    await play(urls, warm_up, ways["episode"](), rounds)
    for round_ in range(rounds):
        order = list(ways) if round_ % 2 == 0 else list(reversed(ways))
        for name, load in loads.items():
            for way in order:
                outcome = await play(urls, load, ways[way](), round_)
                found[name, way].append(outcome)
                share = outcome.found / outcome.prompts
                print(
                    f"round {round_}, {name}, {way}: {outcome.throughput:.1f} tokens/s, {share:.2f} found, "
                    f"{outcome.seconds:.1f} s",
                    file=sys.stderr,
                )
    return found


def report(found: Found) -> str:
    def median(load: str, way: str) -> float:
        return statistics.median(outcome.throughput for outcome in found[load, way])

    lines = [
        "| prompts | placed by | sampled tokens/s | each round | of *episode* | found | first "
        "| p50 call | p99 call | moves | failed |",
        "|---|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    beliefs = []
    for (load, way), outcomes in found.items():
        prompts = sum(outcome.prompts for outcome in outcomes)
        share = sum(outcome.found for outcome in outcomes) / prompts
        first = sum(outcome.found_first for outcome in outcomes) / sum(outcome.firsts for outcome in outcomes)
        lines.append(
            f"| {load} | {way} | {median(load, way):.0f} "
            f"| {', '.join(f'{outcome.throughput:.0f}' for outcome in outcomes)} "
            f"| {median(load, way) / median(load, 'episode'):.2f} | {share:.2f} | {first:.2f} "
            f"| {call_times(outcomes)} "
            f"| {sum(outcome.moves for outcome in outcomes)} | {sum(outcome.failed for outcome in outcomes)} |"
        )
        if way == "cache":
            believed = sum(outcome.believed for outcome in outcomes) / prompts
            beliefs.append(f"{load}: *cache* believed {believed:.2f} to be there, {share:.2f} was.")
    return "\n".join([*lines, "", *beliefs])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--groups", type=int, default=4)
    parser.add_argument("--first", type=int, default=2400, help="tokens of an episode's first prompt")
    parser.add_argument("--turns", type=int, default=4, help="calls of an episode")
    parser.add_argument("--rounds", type=int, default=2)
    arguments = parser.parse_args()
    length = arguments.first + arguments.turns * (TOOL_TOKENS + COMPLETION_TOKENS)
    tokens = int(ROOM * AT_ONCE * length)
    loads = {
        name: Load(arguments.groups, arguments.first, arguments.turns, shared=name == "shared") for name in LOADS
    }
    with sglang_processes(TINY, WORKERS, ["--max-total-tokens", str(tokens)]) as servers:
        urls = [server.url for server in servers]
        started = time.perf_counter()
        found = anyio.run(measure, urls, loads, tokens, arguments.rounds)
    print(f"{arguments.groups} groups of {GROUP_SIZE} episodes of {length} tokens, {AT_ONCE} episodes at once;")
    print(f"each of {WORKERS} engines holds {tokens} tokens; {time.perf_counter() - started:.0f} s.\n")
    print(report(found))


if __name__ == "__main__":
    main()
