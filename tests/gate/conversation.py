"""What the suites of the gate say and hear: scripted answers that wait for the test, raw streams, records."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from itertools import pairwise
from typing import Any, Literal

import anyio
import httpx
from gate_support import Prompted, Said, Stage

from turnstile_server.journal.protocol import Record, RecordType
from waiting import PATIENCE_S, wait_until

END = "<|im_end|>"
GO: list[dict[str, Any]] = [{"role": "user", "content": "go"}]
TOOL = {
    "type": "function",
    "function": {
        "name": "bash",
        "description": "Runs a command.",
        "parameters": {"type": "object", "properties": {"command": {"type": "string"}}},
    },
}


def call_text(command: str, name: str = "bash") -> str:
    """A tool call as the tiny model's template asks for it."""
    call = json.dumps({"name": name, "arguments": {"command": command}})
    return f"<tool_call>\n{call}\n</tool_call>"


class Held:
    """An answer whose chunks leave one at a time, each when the test says. It does not know of aborts."""

    def __init__(self, *chunks: Sequence[int], finish: Literal["stop", "length", "abort"] = "stop") -> None:
        self.called = anyio.Event()
        self.said = 0
        self._chunks = chunks
        self._finish = finish
        self._steps = anyio.Semaphore(0)

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            self._steps.release()

    def all(self) -> None:
        self.step(len(self._chunks))

    async def __call__(self, _: Prompted) -> AsyncIterator[Said | Exception]:
        self.called.set()
        for index, chunk in enumerate(self._chunks):
            await self._steps.acquire()
            self.said += 1
            yield Said(chunk, self._finish if index == len(self._chunks) - 1 else None)


class HeldAppends:
    """Stands in a journal's way: records of a type wait until the test lets them go, before the disk or behind it.
    Behind it they are durable, and only the reply waits."""

    def __init__(self, stage: Stage, kind: RecordType, *, behind: bool) -> None:
        self.reached = anyio.Event()
        self._go = anyio.Event()
        self._kind = kind
        self._behind = behind
        self._append = stage.journal.append

    def release(self) -> None:
        self._go.set()

    async def __call__(self, record: Record) -> int:
        if record.type is not self._kind:
            return await self._append(record)
        if not self._behind:
            await self._wait()
        size = await self._append(record)
        if self._behind:
            await self._wait()
        return size

    async def _wait(self) -> None:
        self.reached.set()
        await self._go.wait()


@contextmanager
def appends_held(
    stage: Stage, kind: RecordType = RecordType.TURN, *, behind: bool = False
) -> Iterator[HeldAppends]:
    held = HeldAppends(stage, kind, behind=behind)
    stage.journal.append = held  # type: ignore[method-assign]
    try:
        yield held
    finally:
        held.release()
        del stage.journal.append


async def in_flight(stage: Stage, count: int) -> None:
    """Returns when the gate has ``count`` callers."""

    async def as_many() -> bool:
        return f"turnstile_calls_in_flight {count}.0" in (await stage.control.get("/metrics")).text

    await wait_until(as_many, f"{count} calls in flight")


def reply_ids(stage: Stage, text: str) -> list[int]:
    """A whole reply, ended."""
    return stage.encode(text + END)


def chunked(ids: Sequence[int], *cuts: int) -> list[list[int]]:
    """``ids`` cut at these positions."""
    bounds = [0, *cuts, len(ids)]
    return [list(ids[start:end]) for start, end in pairwise(bounds)]


def one_by_one(ids: Sequence[int]) -> list[list[int]]:
    return [[token] for token in ids]


def url(episode: dict[str, Any]) -> str:
    return f"{episode['model_url']}/v1/chat/completions"


def auth(episode: dict[str, Any]) -> dict[str, str]:
    return {"authorization": f"Bearer {episode['episode_key']}"}


def body(**fields: Any) -> dict[str, Any]:
    return {"model": "m", "messages": GO, **fields}


@asynccontextmanager
async def raw(episode: dict[str, Any], **options: Any) -> AsyncIterator[httpx.AsyncClient]:
    """A plain HTTP client with the episode's key."""
    options = {"headers": auth(episode), **options}
    async with httpx.AsyncClient(timeout=PATIENCE_S, verify=False, **options) as client:
        yield client


async def collect(stream: Any) -> dict[str, Any]:
    """A whole stream of the SDK, put together the way agents do."""
    content, reasoning, finish, usage = "", "", None, None
    calls: dict[int, dict[str, str]] = {}
    async for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            content += choice.delta.content or ""
            reasoning += (choice.delta.model_extra or {}).get("reasoning_content") or ""
            finish = choice.finish_reason or finish
            for delta in choice.delta.tool_calls or []:
                call = calls.setdefault(delta.index, {"id": "", "name": "", "arguments": ""})
                call["id"] += delta.id or ""
                call["name"] += delta.function.name or ""
                call["arguments"] += delta.function.arguments or ""
    return {
        "content": content,
        "reasoning": reasoning,
        "calls": [calls[index] for index in sorted(calls)],
        "finish": finish,
        "usage": usage,
    }


def whole(reply: Any) -> dict[str, Any]:
    """An unstreamed reply of the SDK in the shape of ``collect``."""
    choice = reply.choices[0]
    return {
        "content": choice.message.content or "",
        "reasoning": (choice.message.model_extra or {}).get("reasoning_content") or "",
        "calls": [
            {"id": call.id, "name": call.function.name, "arguments": call.function.arguments}
            for call in choice.message.tool_calls or []
        ],
        "finish": choice.finish_reason,
        "usage": reply.usage,
    }


async def turns(stage: Stage, episode: dict[str, Any]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = (await stage.get(episode, "/turns"))["turns"]
    return found


async def turns_once(stage: Stage, episode: dict[str, Any], count: int = 1) -> list[dict[str, Any]]:
    """The turns, as soon as there are ``count``."""

    async def enough() -> list[dict[str, Any]]:
        found = await turns(stage, episode)
        return found if len(found) >= count else []

    return await wait_until(enough, f"{count} turns")


async def discarded_once(stage: Stage, episode: dict[str, Any]) -> dict[str, int]:
    """The episode's discarded tokens by reason, as soon as there are any."""

    async def discarded() -> dict[str, int]:
        counts: dict[str, int] = (await stage.get(episode))["stats"]["discarded"]
        return counts

    return await wait_until(discarded, "discarded tokens")


async def ended_once(stage: Stage, episode: dict[str, Any]) -> dict[str, Any]:
    """The episode, as soon as it has ended."""
    with anyio.fail_after(PATIENCE_S):
        while (found := await stage.get(episode, "?wait=5"))["status"] == "running":
            pass
    ended: dict[str, Any] = found
    return ended
