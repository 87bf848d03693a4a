"""Measures one server at one length of history, and checks that the numbers are valid.

Servers take turns in short slices, so that other work on the machine affects them alike. *Latency* slices keep
one call in flight, *throughput* slices as many as there are episodes; counters are taken over the former.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from gate_parts.conversation import Body, Conversation
from gate_parts.servers import Server, connections, fetch
from gate_parts.wire import Answered, Connection

TEMPLATE_BYTES = 200
"""Most bytes that the chat template may add around one tool result, markers and generation prompt included."""


@dataclass(frozen=True, slots=True)
class Plan:
    lengths: tuple[int, ...]
    """Tokens of history."""
    rounds: int
    calls: int
    """Calls of one latency slice."""
    slice_s: float
    """Duration of one throughput slice, and the most of a latency slice (which has at least three calls)."""
    episodes: int


@dataclass
class Row:
    """One server, one length, streamed or not. Times in seconds."""

    server: str
    length: int
    stream: bool
    body_bytes: int = 0
    result_bytes: int = 0
    latencies: list[float] = field(default_factory=list)
    first_bytes: list[float] = field(default_factory=list)
    cpu_s: float = 0.0
    turns: int = 0
    """Of the throughput slices, within ``wall_s``."""
    wall_s: float = 0.0
    turns_cpu_s: float = 0.0
    counters: dict[str, float] = field(default_factory=dict)
    """Growth of Turnstile's counters over the latency slices."""

    @property
    def calls(self) -> int:
        return len(self.latencies)

    def figures(self) -> dict[str, Any]:
        """Milliseconds, and turns per second as measured and as the CPU time alone would allow."""
        return {
            "server": self.server,
            "tokens": self.length,
            "stream": self.stream,
            "body_bytes": self.body_bytes,
            "calls": self.calls,
            "p50_ms": 1e3 * float(np.quantile(self.latencies, 0.5)),
            "p99_ms": 1e3 * float(np.quantile(self.latencies, 0.99)),
            "first_byte_p50_ms": 1e3 * float(np.quantile(self.first_bytes, 0.5)),
            "cpu_ms": 1e3 * self.cpu_s / self.calls,
            "turns_per_s": self.turns / self.wall_s,
            "turns_per_cpu_s": self.turns / self.turns_cpu_s,
            "fsync_ms": 1e3 * self.counters.get("turnstile_journal_fsync_seconds", 0.0) / self.calls,
            "fsyncs": self.counters.get("turnstile_journal_fsyncs", 0.0) / self.calls,
            "tokenized_bytes": self.counters.get("turnstile_tokenized_bytes", 0.0) / self.calls,
        }


class Measurement:
    def __init__(self, conversation: Conversation, servers: list[Server], plan: Plan) -> None:
        self._conversation = conversation
        self._servers = servers
        self._plan = plan
        self._numbers = itertools.count()
        self._turns = 0
        self._prompt_tokens = 0

    async def run(self) -> list[Row]:
        rows: list[Row] = []
        for length in self._plan.lengths:
            await self._grow(length)
            for stream in (False, True):
                rows += await self._at(length, stream)
                print(f"measured {length} tokens, {'streamed' if stream else 'unstreamed'}", flush=True)
        _check_tokenized(rows)
        for server in self._servers:
            await self._check_captured(server)
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
        calls = (self._send(server, link, server.head(at, 0), body) for at, link in enumerate(links))
        return await asyncio.gather(*calls)

    async def _at(self, length: int, stream: bool) -> list[Row]:
        body = self._conversation.body(self._turns, stream=stream)
        rows = {
            server.name: Row(server.name, length, stream, body.size, body.result_bytes) for server in self._servers
        }
        for server in self._servers:
            await self._latency(server, Row(server.name, length, stream), body)  # connections, caches, code paths
        for _ in range(self._plan.rounds):
            for server in self._servers:
                await self._latency(server, rows[server.name], body)
        for _ in range(self._plan.rounds):
            for server in self._servers:
                await self._throughput(server, rows[server.name], body)
        return list(rows.values())

    async def _latency(self, server: Server, row: Row, body: Body) -> None:
        head = server.head(0, self._prompt_tokens)
        async with connections(server, 1) as (link,):
            await self._call(server, link, head, body)
            before, cpu = await server.metrics(), server.process.cpu_s()
            began = time.perf_counter()
            for count in range(self._plan.calls):
                if count >= 3 and time.perf_counter() - began > self._plan.slice_s:
                    break
                answer = await self._call(server, link, head, body)
                row.latencies.append(answer.total_s)
                row.first_bytes.append(answer.first_s)
            row.cpu_s += server.process.cpu_s() - cpu
        for name, value in (await server.metrics()).items():
            if name.endswith("_total"):
                counter = name.removesuffix("_total")
                row.counters[counter] = row.counters.get(counter, 0.0) + value - before.get(name, 0.0)

    async def _throughput(self, server: Server, row: Row, body: Body) -> None:
        began, cpu = time.perf_counter(), server.process.cpu_s()
        until = began + self._plan.slice_s

        async def keep_calling(episode: int) -> int:
            head = server.head(episode, self._prompt_tokens)
            count = 0
            async with connections(server, 1) as (link,):
                while time.perf_counter() < until:
                    await self._call(server, link, head, body)
                    count += 1
            return count

        row.turns += sum(await asyncio.gather(*(keep_calling(at) for at in range(self._plan.episodes))))
        row.wall_s += time.perf_counter() - began
        row.turns_cpu_s += server.process.cpu_s() - cpu

    async def _call(self, server: Server, link: Connection, head: bytes, body: Body) -> Answered:
        return await self._send(server, link, head, body.parts(next(self._numbers)))

    async def _send(self, server: Server, link: Connection, head: bytes, parts: Sequence[bytes]) -> Answered:
        answer = await link.request(head, parts)
        if answer.status != 200:
            raise SystemExit(f"{server.name} answered {answer.status}: {answer.body[:500]!r}")
        return answer

    async def _check_captured(self, server: Server) -> None:
        """Every call of Turnstile was a continuation, and each of its tokens was recorded; the peer recorded the
        same completions."""
        if server.traces_url is not None:
            await asyncio.to_thread(fetch, server.base_url + "/admin/flush", {})
            trace = json.loads(await asyncio.to_thread(fetch, server.traces_url))[0]
            if (
                trace["completion_token_ids"] != list(self._conversation.reply.ids)
                or not trace["prompt_token_ids"]
            ):
                raise SystemExit(f"{server.name} did not record the tokens of its first call")
        counters = await server.metrics()
        if not counters:
            return
        turns = sum(value for name, value in counters.items() if name == "turnstile_calls_total")
        sampled = counters["turnstile_tokens_sampled_total"]
        if sampled != turns * len(self._conversation.reply.ids):
            raise SystemExit(f"{server.name} recorded {sampled:.0f} tokens of {turns:.0f} turns")
        for name in ("turnstile_breaks_total", "turnstile_tokens_rerendered_total"):
            if counters.get(name, 0.0):
                raise SystemExit(
                    f"{server.name}: {name} is {counters[name]:.0f}; every call should have continued"
                )


def _check_tokenized(rows: list[Row]) -> None:
    """The bytes that went through the tokenizer are those of the new message and the template's text around it:
    the same number in every turn, whatever the length of the history."""
    seen: set[float] = set()
    for row in rows:
        if "turnstile_tokenized_bytes" not in row.counters:
            continue
        per_turn = row.counters["turnstile_tokenized_bytes"] / row.calls
        seen.add(per_turn)
        if len(seen) > 1 or not row.result_bytes <= per_turn <= row.result_bytes + TEMPLATE_BYTES:
            raise SystemExit(
                f"{row.server} tokenized {per_turn:.1f} bytes per turn at {row.length} tokens of history; "
                f"the new message has {row.result_bytes}, and so far a turn had {sorted(seen)}"
            )
