"""Calls of functions per turn, in servers whose process counts them (``gate_parts.counted``)."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gate_parts.conversation import CHAIN, Conversation
from gate_parts.counted import read_counts
from gate_parts.measure import send
from gate_parts.server import Server, connections
from gate_parts.servers import Servers
from gate_parts.wire import Connection

IDLE_S = 3.0


@dataclass(frozen=True, slots=True)
class CallCounts:
    """Calls per turn: Python frames entered, C functions called from Python. ``idle``: frames per second that the
    process enters without any call. For as long as the turns took, they are taken from the others: a busy machine
    takes longer for a turn, and timers go on."""

    server: str
    tokens: int
    stream: bool
    python: float
    c: float
    idle: float

    def figures(self) -> dict[str, Any]:
        return asdict(self)


class CallCounting:
    """``chains``: counted at each length, streamed and not. ``folder``: a short path, for sockets."""

    def __init__(self, model: Path, servers: Servers, folder: Path, lengths: Sequence[int], chains: int) -> None:
        self._conversation = Conversation(model)
        self._servers = servers
        self._folder = folder
        self._lengths = lengths
        self._chains = chains
        self._grown: dict[int, tuple[int, int]] = {}
        """Turns, and tokens of the prompt after them, by length."""
        self._numbers = itertools.count(step=CHAIN)

    async def run(self) -> list[CallCounts]:
        paths = [self._folder / "turnstile.count", self._folder / "relay.count"]
        wrappers = [("gate_parts.counted", str(path)) for path in paths]
        ours = await self._servers.turnstile("process", name="turnstile-counted", wrapper=wrappers[0], episodes=1)
        relay = await self._servers.relay(wrappers[1])
        counts: list[CallCounts] = []
        for path, server in zip(paths, (ours, relay), strict=True):
            async with connections(server, 1) as (link,):
                for length in self._lengths:
                    if server.grown:
                        await self._grow(server, link, length)
                    for stream in (False, True):
                        counts.append(await self._counted(server, link, path, length, stream))
            await server.check_captured(self._conversation.reply)
        return counts

    async def _grow(self, server: Server, link: Connection, length: int) -> None:
        turns, prompt = max(self._grown.values(), default=(0, 0))
        while prompt < length:
            answer = await send(server, link, server.head(0, 0), [self._conversation.step(turns)])
            prompt = json.loads(answer.body)["usage"]["prompt_tokens"]
            turns += 1
        self._grown[length] = turns, prompt

    async def _counted(
        self, server: Server, link: Connection, path: Path, length: int, stream: bool
    ) -> CallCounts:
        turns, prompt = self._grown[length]
        bodies, head = self._conversation.chain(turns, stream=stream), server.head(0, prompt)
        before = read_counts(path)
        await asyncio.sleep(IDLE_S)
        after = read_counts(path)
        idle = {kind: (after[kind] - before[kind]) / IDLE_S for kind in after}
        totals = dict.fromkeys(after, 0.0)
        for chain in range(-1, self._chains):
            number = next(self._numbers)
            await send(server, link, head, bodies[0].parts(number))
            before, began = read_counts(path), time.perf_counter()
            for body in bodies[1:]:
                await send(server, link, head, body.parts(number))
            took_s, after = time.perf_counter() - began, read_counts(path)
            if chain >= 0:  # the one before fills caches
                for kind in totals:
                    totals[kind] += after[kind] - before[kind] - took_s * idle[kind]
        calls = self._chains * (len(bodies) - 1)
        per_turn = {kind: count / calls for kind, count in totals.items()}
        return CallCounts(server.name, length, stream, per_turn["python"], per_turn["c"], idle["python"])
