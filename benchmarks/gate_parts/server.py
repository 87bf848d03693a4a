"""One measured server: where a call goes, with which headers, whose CPU time it costs, and what it must record."""

from __future__ import annotations

import asyncio
import contextlib
import json
import urllib.request
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

from gate_parts.conversation import Reply
from gate_parts.process import Process
from gate_parts.wire import Connection

KEY = "benchmark-control-key"


@dataclass
class Server:
    """``paths``: where an episode's call goes, and with which extra headers, one per episode.

    Without a ``control_url`` it records nothing: the engine itself, or the relay."""

    name: str
    port: int
    process: Process
    paths: list[tuple[str, dict[str, str]]]
    control_url: str | None = None
    """Turnstile only: the control API."""
    grown: bool = False
    """It must see a history turn by turn before a call can continue it."""

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def head(self, episode: int, prompt_tokens: int) -> bytes:
        path, headers = self.paths[episode % len(self.paths)]
        lines = [f"POST {path} HTTP/1.1", "host: 127.0.0.1", "content-type: application/json"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        lines += [f"x-bench-tokens: {prompt_tokens}", ""]
        return "\r\n".join(lines).encode()

    async def begin_slice(self) -> None:
        """Called before a slice of calls, outside of what is measured; ``head`` may change."""

    async def new_episode(self) -> tuple[str, dict[str, str]]:
        """Turnstile only: the path and headers of the model calls of an episode of an external agent."""
        task = {"task": {"instruction": "benchmark"}, "agent": "external"}
        created = json.loads(await asyncio.to_thread(fetch, f"{self.control_url}/episodes", task))
        path = created["model_url"].removeprefix(self.base_url) + "/v1/chat/completions"
        return path, {"authorization": f"Bearer {created['episode_key']}"}

    async def metrics(self) -> dict[str, float]:
        """Turnstile's counters, labelled ones summed; empty for the others."""
        if self.control_url is None:
            return {}
        return parse_metrics((await asyncio.to_thread(fetch, self.control_url + "/metrics")).decode())

    async def check_captured(self, reply: Reply) -> None:
        """Raises SystemExit unless every call was a continuation and each of its tokens was recorded."""
        counters = await self.metrics()
        if not counters:
            return
        turns = counters["turnstile_calls_total"]
        sampled = counters["turnstile_tokens_sampled_total"]
        if sampled != turns * len(reply.ids):
            raise SystemExit(f"{self.name} recorded {sampled:.0f} tokens of {turns:.0f} turns")
        for name in ("turnstile_breaks_total", "turnstile_tokens_rerendered_total"):
            if counters.get(name, 0.0):
                raise SystemExit(f"{self.name}: {name} is {counters[name]:.0f}; every call should have continued")


def parse_metrics(text: str) -> dict[str, float]:
    """Prometheus text as totals by name, over all labels."""
    totals: dict[str, float] = {}
    for line in text.splitlines():
        if line and not line.startswith("#"):
            name, _, value = line.rpartition(" ")
            name = name.partition("{")[0]
            totals[name] = totals.get(name, 0.0) + float(value)
    return totals


@contextlib.asynccontextmanager
async def connections(server: Server, count: int) -> AsyncIterator[list[Connection]]:
    opened = [await Connection.open(server.port) for _ in range(count)]
    try:
        yield opened
    finally:
        for connection in opened:
            connection.close()


def fetch(url: str, body: Any = None, method: str | None = None) -> bytes:
    """The content of a reply; a ``body``, which is sent as JSON, makes it a POST. Raises urllib's HTTPError."""
    data = None if body is None else json.dumps(body).encode()
    headers = {"authorization": f"Bearer {KEY}", "content-type": "application/json"}
    request = urllib.request.Request(url, data, headers, method=method)
    with urllib.request.urlopen(request, timeout=60) as answer:
        content: bytes = answer.read()
        return content
