"""Agents of the worker's tests: functions that the worker's own process imports by this module's name."""

from __future__ import annotations

import asyncio
import itertools
import sys
import time
from typing import Any

import httpx

from turnstile.exporters.trl.servers import TurnstileServers

RIGHT = {"instruction": "Say right.", "answer": {"value": "right"}}
UNGRADED = {"instruction": "Say anything."}

_calls = itertools.count()
_right: dict[str | None, bool] = {}


async def _ask(episode: Any, question: str) -> None:
    async with httpx.AsyncClient(headers={"authorization": f"Bearer {episode.episode_key}"}, timeout=120) as http:
        body = {"model": "any", "max_tokens": 6, "messages": [{"role": "user", "content": question}]}
        (await http.post(f"{episode.model_url}/v1/chat/completions", json=body)).raise_for_status()


async def _submit(episode: Any, answer: str) -> None:
    version, prefix = "2026-07-28", "io.modelcontextprotocol/"
    headers = {
        "authorization": f"Bearer {episode.episode_key}",
        "accept": "application/json, text/event-stream",
        "mcp-protocol-version": version,
        "mcp-method": "tools/call",
        "mcp-name": "submit",
    }
    meta = {f"{prefix}protocolVersion": version, f"{prefix}clientCapabilities": {}}
    params = {"name": "submit", "arguments": {"answer": answer}, "_meta": meta}
    async with httpx.AsyncClient(headers=headers, timeout=120) as http:
        call = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": params}
        (await http.post(episode.tool_url, json=call)).raise_for_status()


async def _turn(episode: Any) -> bool:
    """Right, wrong, right, wrong, … within each group."""
    group = (await episode.status()).group_id
    _right[group] = not _right.get(group, False)
    return _right[group]


async def by_turns(episode: Any) -> None:
    right = await _turn(episode)
    await _ask(episode, f"call {episode.episode_id}")
    await _submit(episode, "right" if right else "wrong")


async def flat_then_by_turns(episode: Any) -> None:
    """The first four rollouts are all wrong."""
    number = next(_calls)
    await _ask(episode, "again")
    await _submit(episode, "right" if number >= 4 and number % 2 == 0 else "wrong")


async def every_third_fails(episode: Any) -> None:
    if next(_calls) % 3 == 0:
        raise RuntimeError("the agent's own fault")
    await by_turns(episode)


async def twice_in_two_contexts(episode: Any) -> None:
    """Two conversations, so two rows of one rollout; right and wrong by turns."""
    right = await _turn(episode)
    await _ask(episode, "the first")
    await _ask(episode, "another")
    await _submit(episode, "right" if right else "wrong")


async def for_ever(episode: Any) -> None:
    await _ask(episode, "then wait")
    await asyncio.Event().wait()


async def blocks(episode: Any) -> None:
    """What a careless agent does: the worker's loop stands still."""
    time.sleep(3600)  # noqa: ASYNC251


def main(url: str, key: str) -> None:
    """A trainer that is killed: it starts a worker and waits."""
    from turnstile.exporters.trl.worker import TurnstileRolloutWorker  # TRL is needed here alone

    servers = TurnstileServers(url, key=key, run="killed")
    worker = TurnstileRolloutWorker(servers, [UNGRADED], agent=for_ever, n=2, max_inflight=2)
    worker.start()
    assert worker._process is not None
    sys.stdout.write(f"{worker._process.pid}\n")
    sys.stdout.flush()
    time.sleep(3600)
