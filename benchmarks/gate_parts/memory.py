"""What episodes cost in memory: private memory of a server's process, before and after they were played.

*Traces*: some episodes of the same length, one after the other; the cost of one is the slope over their number,
after a first one that is not counted, because the server keeps what its largest call needed. *Open*: many shorter
episodes, all open at once; the cost is all that the process has. Each episode has a text of its own.

*Hot* is right after an episode's last call, *at rest* after ``rest_s`` seconds without any.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from gate_parts.conversation import Conversation
from gate_parts.measure import send
from gate_parts.server import Server, connections
from gate_parts.servers import Servers

SETTLE_S = 1.0
AT_ONCE = 4


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Lengths in tokens. ``traces``: at least two, besides the first."""

    trace_tokens: int
    traces: int
    open_tokens: int
    open_episodes: int
    rest_s: float


@dataclass(frozen=True, slots=True)
class MemoryCost:
    """In MB of 10^6 bytes."""

    trace_tokens: int
    traces: int
    trace_hot_mb: float
    trace_rest_mb: float
    open_tokens: int
    open_episodes: int
    empty_mb: float
    """The process before its first call."""
    open_hot_mb: float
    open_rest_mb: float
    rest_s: float

    def figures(self) -> dict[str, Any]:
        return asdict(self)


class MemoryMeasurement:
    """Plays on servers of its own, of ``servers``."""

    def __init__(self, model: Path, servers: Servers, plan: MemoryPlan) -> None:
        self._model = model
        self._servers = servers
        self._plan = plan

    async def run(self) -> MemoryCost:
        hot, rest = await self._traces()
        print(f"measured the memory of {self._plan.traces} traces", flush=True)
        empty, open_hot, open_rest = await self._open()
        print(f"measured the memory of {self._plan.open_episodes} open episodes", flush=True)
        plan = self._plan
        return MemoryCost(
            plan.trace_tokens,
            plan.traces,
            hot,
            rest,
            plan.open_tokens,
            plan.open_episodes,
            empty,
            open_hot,
            open_rest,
            plan.rest_s,
        )

    async def _traces(self) -> tuple[float, float]:
        """MB of one trace, hot and at rest."""
        server = await self._servers.turnstile("process", name="turnstile-traces", episodes=0)
        await self._play(server, 0, self._plan.trace_tokens)
        hot = [await self._settled(server, SETTLE_S)]
        before = await self._settled(server, self._plan.rest_s)
        for seed in range(1, self._plan.traces + 1):
            await self._play(server, seed, self._plan.trace_tokens)
            hot.append(await self._settled(server, SETTLE_S))
        after = await self._settled(server, self._plan.rest_s)
        await server.check_captured(Conversation(self._model).reply)
        await self._servers.stop(server.process)
        return slope(hot), (after - before) / self._plan.traces

    async def _open(self) -> tuple[float, float, float]:
        """MB of the process: empty, with all episodes open, and after a rest."""
        server = await self._servers.turnstile("process", name="turnstile-open", episodes=0)
        empty = await self._settled(server, SETTLE_S)
        seeds = iter(range(self._plan.open_episodes))

        async def play_some() -> None:
            for seed in seeds:
                await self._play(server, seed, self._plan.open_tokens)

        await asyncio.gather(*(play_some() for _ in range(AT_ONCE)))
        hot = await self._settled(server, SETTLE_S)
        rest = await self._settled(server, self._plan.rest_s)
        await server.check_captured(Conversation(self._model).reply)
        await self._servers.stop(server.process)
        return empty, hot, rest

    async def _play(self, server: Server, seed: int, tokens: int) -> None:
        """A new episode, turn by turn until its last prompt has ``tokens`` tokens."""
        conversation = Conversation(self._model, seed)
        path = await server.new_episode()
        server.paths.append(path)
        head = server.head(server.paths.index(path), 0)
        async with connections(server, 1) as (link,):
            turns, prompt = 0, 0
            while prompt < tokens:
                answer = await send(server, link, head, [conversation.step(turns)])
                prompt = json.loads(answer.body)["usage"]["prompt_tokens"]
                turns += 1

    async def _settled(self, server: Server, seconds: float) -> float:
        await asyncio.sleep(seconds)
        return server.process.private_mb()


def slope(totals: Sequence[float]) -> float:
    """The cost of one more, by least squares: ``totals`` after none, one, two, …"""
    return float(np.polyfit(np.arange(len(totals)), np.asarray(totals), 1)[0])
