"""Measures the servers at several lengths of history, and checks that the numbers are valid.

Servers take turns in short slices, so that other work on the machine affects them alike. *Latency* slices keep one
call in flight, *throughput* slices as many as there are episodes, *first-text* slices have an engine that streams
token after token. Counters are taken over the first kind.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass

from gate_parts.conversation import CHAIN, Body, Conversation
from gate_parts.row import Row, Slice
from gate_parts.server import Server, connections
from gate_parts.servers import Servers
from gate_parts.wire import Answered, Connection

TEMPLATE_BYTES = 200
"""Most bytes that the chat template may add around one tool result, markers and generation prompt included."""


@dataclass(frozen=True, slots=True)
class Plan:
    lengths: tuple[int, ...]
    """Tokens of history."""
    rounds: int
    """Slices of each kind, of each server at each length."""
    chains: int
    """Chains of calls in a latency slice, and in a first-text slice."""
    warm_chains: int
    """Chains that a latency slice plays first, and does not count: the server before it on the core has taken the
    processor's caches, which a server that is busy has to itself."""
    slice_s: float
    """Duration of one throughput slice, and the most of the others (which have at least one chain)."""
    episodes: int


class Measurement:
    def __init__(self, conversation: Conversation, control: Servers, servers: list[Server], plan: Plan) -> None:
        """``control``: of the engine that the ``servers`` call."""
        self._conversation = conversation
        self._control = control
        self._servers = servers
        self._plan = plan
        self._numbers = itertools.count(step=CHAIN)
        self._turns = 0
        self._prompt_tokens = 0

    async def run(self) -> list[Row]:
        rows: list[Row] = []
        for length in self._plan.lengths:
            await self._grow(length)
            for stream in (False, True):
                rows += await self._at(length, stream)
                print(f"measured {length} tokens, {'streamed' if stream else 'unstreamed'}", flush=True)
        check_tokenized(rows)
        for server in self._servers:
            await server.check_captured(self._conversation.reply)
        return rows

    async def _grow(self, length: int) -> None:
        """Turn by turn, until a prompt has ``length`` tokens: on the servers that follow a conversation."""
        first, *others = [server for server in self._servers if server.grown]
        start = self._turns
        async with connections(first, self._plan.episodes) as links:
            while self._prompt_tokens < length:
                answers = await self._step(first, links, self._turns)
                self._prompt_tokens = json.loads(answers[0].body)["usage"]["prompt_tokens"]
                self._turns += 1
        for server in others:
            async with connections(server, self._plan.episodes) as links:
                for turns in range(start, self._turns):
                    await self._step(server, links, turns)

    async def _step(self, server: Server, links: list[Connection], turns: int) -> list[Answered]:
        body = [self._conversation.step(turns)]
        calls = (send(server, link, server.head(at, 0), body) for at, link in enumerate(links))
        return await asyncio.gather(*calls)

    async def _at(self, length: int, stream: bool) -> list[Row]:
        bodies = self._conversation.chain(self._turns, stream=stream)
        sizes = bodies[0].size, bodies[0].result_bytes
        rows = {server.name: Row(server.name, length, stream, *sizes) for server in self._servers}
        for server in self._servers:
            await self._latency(
                server, Row(server.name, length, stream), bodies
            )  # connections, caches, code paths
        kinds = [self._latency, self._throughput, *([self._first_text] if stream else [])]
        for kind in kinds:
            for _ in range(self._plan.rounds):
                for server in self._servers:
                    await kind(server, rows[server.name], bodies)
        return list(rows.values())

    async def _latency(self, server: Server, row: Row, bodies: Sequence[Body]) -> None:
        """The first call of each chain is sent and not counted."""
        await server.begin_slice()
        head = server.head(0, self._prompt_tokens)
        calls, cpu_s, wall_s, chains = 0, 0.0, 0.0, 0
        async with connections(server, 1) as (link,):
            for _ in range(self._plan.warm_chains):
                number = next(self._numbers)
                for body in bodies:
                    await send(server, link, head, body.parts(number))
            before, began = await server.metrics(), time.perf_counter()
            while chains < self._plan.chains and (not chains or time.perf_counter() - began < self._plan.slice_s):
                number, chains = next(self._numbers), chains + 1
                await send(server, link, head, bodies[0].parts(number))
                at, cpu = time.perf_counter(), server.process.cpu_s()
                for body in bodies[1:]:
                    answer = await send(server, link, head, body.parts(number))
                    row.latencies.append(answer.total_s)
                    calls += 1
                cpu_s += server.process.cpu_s() - cpu
                wall_s += time.perf_counter() - at
        row.single.append(Slice(calls, cpu_s, wall_s))
        row.count(before, await server.metrics(), chains * len(bodies))

    async def _throughput(self, server: Server, row: Row, bodies: Sequence[Body]) -> None:
        await server.begin_slice()
        began, cpu = time.perf_counter(), server.process.cpu_s()
        until = began + self._plan.slice_s

        async def keep_calling(episode: int) -> int:
            head = server.head(episode, self._prompt_tokens)
            count = 0
            async with connections(server, 1) as (link,):
                while True:
                    number = next(self._numbers)
                    for body in bodies:
                        await send(server, link, head, body.parts(number))
                        count += 1
                        if time.perf_counter() >= until:
                            return count

        calls = sum(await asyncio.gather(*(keep_calling(at) for at in range(self._plan.episodes))))
        row.several.append(Slice(calls, server.process.cpu_s() - cpu, time.perf_counter() - began))

    async def _first_text(self, server: Server, row: Row, bodies: Sequence[Body]) -> None:
        await server.begin_slice()
        head = server.head(0, self._prompt_tokens)
        seen: list[float] = []
        await self._control.pace_engine(True)
        async with connections(server, 1) as (link,):
            await self._control.first_tokens()
            began = time.perf_counter()
            for chain in range(self._plan.chains):
                if chain and time.perf_counter() - began > self._plan.slice_s:
                    break
                number = next(self._numbers)
                for body in bodies:
                    seen.append((await send(server, link, head, body.parts(number))).text_at)
        written = await self._control.first_tokens()
        await self._control.pace_engine(False)
        row.first_texts += first_text_delays(server.name, written, seen)


async def send(server: Server, link: Connection, head: bytes, parts: Sequence[bytes]) -> Answered:
    """Raises SystemExit for any other status than 200."""
    answer = await link.request(head, parts)
    if answer.status != 200:
        raise SystemExit(f"{server.name} answered {answer.status}: {answer.body[:500]!r}")
    return answer


def first_text_delays(server: str, written: Sequence[float], seen: Sequence[float]) -> list[float]:
    """Seconds from the engine's write of each call's first token to the agent's read of its text; nothing where
    the engine was asked for no stream at all. Raises SystemExit where calls and streams do not belong together."""
    if not written:
        return []
    delays = [text - token for token, text in zip(written, seen, strict=False)]
    if len(written) != len(seen) or not all(seen) or min(delays) < 0:
        raise SystemExit(
            f"{server}: {len(written)} streams of the engine for {len(seen)} calls, or no text in one"
        )
    return delays


def check_tokenized(rows: Sequence[Row]) -> None:
    """The bytes that went through the tokenizer are those of the new message and the template's text around it:
    the same number in every turn, whatever the length of the history. Raises SystemExit otherwise."""
    seen: set[float] = set()
    for row in rows:
        if "turnstile_tokenized_bytes" not in row.counters:
            continue
        per_turn = row.counters["turnstile_tokenized_bytes"] / row.counted
        seen.add(per_turn)
        if len(seen) > 1 or not row.result_bytes <= per_turn <= row.result_bytes + TEMPLATE_BYTES:
            raise SystemExit(
                f"{row.server} tokenized {per_turn:.1f} bytes per turn at {row.length} tokens of history; "
                f"the new message has {row.result_bytes}, and so far a turn had {sorted(seen)}"
            )
