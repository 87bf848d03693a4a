"""The reference that captures nothing: SGLang's own OpenAI server, beside Turnstile in front of the same SGLang.

Both get the same conversations: a system prompt, tools, a first message of ``first`` tokens, then turns of a short
reply and a message of 250 tokens, each turn with everything before it. SGLang's own ``/v1/chat/completions``
renders and tokenizes each prompt whole and gives text. Through Turnstile it gets token ids at ``/generate``, and
gives ids and logprobs, which Turnstile records. Replies are the model's own, so their text differs; their number
of tokens is shown.

Episodes alternate between the two. The first call of each fills the engine's prefix cache and is not counted; one
call is in flight. CPU is that of each process: Turnstile; SGLang's main process, which is its HTTP server and its
tokenizer; its scheduler, which runs the model; its detokenizer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np

from gate_parts.chat_reply import read_reply
from gate_parts.conversation import Conversation
from gate_parts.measure import send
from gate_parts.process import cpu_s, descendants
from gate_parts.row import Figures, quiet
from gate_parts.server import Server, connections
from gate_parts.servers import Servers
from gate_parts.wire import Connection

DIRECT, THROUGH = "sglang", "turnstile"
TURNSTILE, HTTP, SCHEDULER, DETOKENIZER, OTHER = "turnstile", "http", "scheduler", "detokenizer", "other"
TITLES: Final = {"sglang::scheduler": SCHEDULER, "sglang::detokenizer": DETOKENIZER}


@dataclass(frozen=True, slots=True)
class ReferencePlan:
    firsts: tuple[int, ...]
    """Tokens of the first message."""
    rounds: int
    """Episodes on each server, of each length and mode."""
    turns: int
    """Counted calls of an episode."""
    sampled: int
    """Most tokens of a reply."""


@dataclass(frozen=True, slots=True)
class Target:
    """A server, and the processes by role that work for its calls."""

    server: Server
    processes: dict[str, list[int]]

    def cpu_s(self) -> dict[str, float]:
        return {role: sum(cpu_s(pid) for pid in pids) for role, pids in self.processes.items()}


@dataclass(frozen=True, slots=True)
class Called:
    """Seconds from the first byte sent; ``first_text_s`` None for a reply without text."""

    total_s: float
    first_text_s: float | None
    tokens: int
    """Sampled."""


@dataclass
class ReferenceRow:
    """One server, one length, streamed or not."""

    through: str
    first: int
    stream: bool
    calls: list[Called] = field(default_factory=list)
    cpu: dict[str, list[float]] = field(default_factory=dict)
    """Seconds per call, one of each episode, by role."""

    def figures(self) -> Figures:
        """Milliseconds; CPU per call is the 25th percentile over episodes."""
        totals = [call.total_s for call in self.calls]
        firsts = [call.first_text_s for call in self.calls if self.stream and call.first_text_s is not None]
        return {
            "through": self.through,
            "first": self.first,
            "stream": self.stream,
            "calls": len(self.calls),
            "p50_ms": 1e3 * float(np.quantile(totals, 0.5)),
            "p99_ms": 1e3 * float(np.quantile(totals, 0.99)),
            "first_text_p50_ms": 1e3 * float(np.quantile(firsts, 0.5)) if firsts else None,
            "cpu_ms": {role: 1e3 * quiet(costs) for role, costs in self.cpu.items()},
            "sampled": sum(call.tokens for call in self.calls) / len(self.calls),
        }


class Reference:
    """Plays on the ``targets``, SGLang itself and Turnstile, of a ``model`` folder."""

    def __init__(self, model: Path, targets: Sequence[Target], plan: ReferencePlan) -> None:
        self._conversation = Conversation(model)
        self._targets = targets
        self._plan = plan
        self._episodes = 0

    async def run(self) -> list[Figures]:
        rows: list[ReferenceRow] = []
        for first in self._plan.firsts:
            for stream in (False, True):
                group = [ReferenceRow(target.server.name, first, stream) for target in self._targets]
                for round_ in range(self._plan.rounds):
                    pairs = list(zip(self._targets, group, strict=True))
                    for target, row in pairs if round_ % 2 == 0 else reversed(pairs):
                        await self._episode(target, row)
                rows += group
                print(f"played {first} tokens, {'streamed' if stream else 'unstreamed'}", flush=True)
        return [row.figures() for row in rows]

    async def _episode(self, target: Target, row: ReferenceRow) -> None:
        """``turns`` counted calls of a conversation that no server has seen."""
        server = target.server
        if server.control_url is not None:
            server.paths[:] = [await server.new_episode()]
        self._episodes += 1
        messages = self._conversation.opening(self._episodes, row.first)
        async with connections(server, 1) as (link,):
            await self._call(target, link, messages, row)
            before = target.cpu_s()
            for turn in range(self._plan.turns):
                text = self._conversation.result(1_000 * self._episodes + turn)
                messages.append({"role": "user", "content": text})
                row.calls.append(await self._call(target, link, messages, row))
            for role, seconds in target.cpu_s().items():
                row.cpu.setdefault(role, []).append((seconds - before[role]) / self._plan.turns)

    async def _call(
        self, target: Target, link: Connection, messages: list[dict[str, Any]], row: ReferenceRow
    ) -> Called:
        """Sends ``messages``, and adds the reply to them."""
        head = target.server.head(0, 0)
        body = self._conversation.request(messages, stream=row.stream, max_tokens=self._plan.sampled)
        answer = await send(target.server, link, head, [body])
        reply = read_reply(answer.body, stream=row.stream)
        messages.append(reply.message)
        return Called(answer.total_s, answer.text_at - answer.sent_at if answer.text_at else None, reply.tokens)


async def played(
    servers: Servers, model: Path, engine: dict[str, list[int]], engine_port: int, plan: ReferencePlan
) -> tuple[list[Figures], int]:
    """Plays on the engine itself, whose processes by role are ``engine``, and on a Turnstile of ``servers``. Also
    says how many of Turnstile's calls broke their path: a reply of random tokens may hold control tags."""
    turnstile = await servers.turnstile("process", name=THROUGH, episodes=0)
    itself = Server(DIRECT, engine_port, turnstile.process, [("/v1/chat/completions", {})])
    ours = [turnstile.process.popen.pid, *turnstile.process.children]
    targets = [Target(itself, engine), Target(turnstile, {TURNSTILE: ours, **engine})]
    rows = await Reference(model, targets, plan).run()
    return rows, int((await turnstile.metrics()).get("turnstile_breaks_total", 0.0))


def engine_processes(pid: int) -> dict[str, list[int]]:
    """The processes of a running SGLang, whose main one is ``pid``, by role."""
    found: dict[str, list[int]] = {HTTP: [pid], SCHEDULER: [], DETOKENIZER: [], OTHER: []}
    for child in descendants(pid):
        found[role_of(Path(f"/proc/{child}/cmdline").read_bytes())].append(child)
    return found


def role_of(command_line: bytes) -> str:
    """Of a child of SGLang, which names its processes."""
    words = command_line.decode("utf-8", "replace")
    return next((role for title, role in TITLES.items() if words.startswith(title)), OTHER)


def reference_table(rows: Sequence[Figures]) -> str:
    """Markdown: each row of SGLang itself, and under it the one through Turnstile."""
    head = ["first message", "mode", "through", "p50 ms", "added", "first text ms", "CPU ms/call: Turnstile"]
    head += ["SGLang's HTTP and tokenizer", "scheduler", "detokenizer", "all but the scheduler", "sampled tokens"]
    out = ["| " + " | ".join(head) + " |", "|---|---|---|" + "---:|" * (len(head) - 3)]
    for row in rows:
        key = DIRECT, row["first"], row["stream"]
        direct = next(each for each in rows if (each["through"], each["first"], each["stream"]) == key)
        cpu = row["cpu_ms"]
        around = sum(milliseconds for role, milliseconds in cpu.items() if role != SCHEDULER)
        cells = [f"{row['first']:,}", "streamed" if row["stream"] else "unstreamed", row["through"]]
        cells += [f"{row['p50_ms']:.1f}", "-" if row is direct else f"{row['p50_ms'] - direct['p50_ms']:.1f}"]
        cells += ["-" if row["first_text_p50_ms"] is None else f"{row['first_text_p50_ms']:.1f}"]
        cells += [f"{cpu[role]:.2f}" if role in cpu else "-" for role in (TURNSTILE, HTTP, SCHEDULER, DETOKENIZER)]
        cells += [f"{around:.2f}", f"{row['sampled']:.1f}"]
        out.append("| " + " | ".join(cells) + " |")
    return "\n".join(out) + "\n"
