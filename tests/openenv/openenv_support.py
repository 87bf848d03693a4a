"""A raw connection to ``/ws``, and the task that needs no sandbox."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import httpx
from websockets.asyncio.client import ClientConnection, connect

from control_support import Door

ANSWER = "42"
TASK = {"instruction": "What is six times seven?", "answer": {"kind": "exact", "value": ANSWER}}
REPLY_S = 60


class Wire:
    """Frames as they are; no client library in between."""

    def __init__(self, connection: ClientConnection) -> None:
        self.connection = connection

    async def send(self, frame: Any) -> None:
        await self.connection.send(frame if isinstance(frame, str) else json.dumps(frame))

    async def receive(self) -> dict[str, Any]:
        with anyio.fail_after(REPLY_S):
            told: dict[str, Any] = json.loads(await self.connection.recv())
            return told

    async def ask(self, frame: Any) -> dict[str, Any]:
        await self.send(frame)
        return await self.receive()

    async def reset(self, **parameters: Any) -> dict[str, Any]:
        told = await self.ask({"type": "reset", "data": {"task": TASK, **parameters}})
        assert told["type"] == "observation", told
        observation: dict[str, Any] = told["data"]["observation"]
        return observation

    async def step(self, **action: Any) -> dict[str, Any]:
        told = await self.ask({"type": "step", "data": action})
        assert told["type"] == "observation", told
        data: dict[str, Any] = told["data"]
        return data


def base_url(door: Door) -> str:
    """As OpenEnv's clients and validator are given it: they cannot send headers."""
    return f"{door.url}/k/{door.key}"


@asynccontextmanager
async def wired(door: Door) -> AsyncIterator[Wire]:
    async with connect(base_url(door).replace("http://", "ws://") + "/ws", proxy=None) as connection:
        yield Wire(connection)


async def ended(door: Door, episode_id: str) -> str:
    """The status that the episode ended with."""
    async with httpx.AsyncClient(base_url=base_url(door), timeout=REPLY_S) as http:
        with anyio.fail_after(REPLY_S):
            while True:
                shown = (await http.get(f"/episodes/{episode_id}", params={"wait": 5})).json()
                if shown["status"] not in ("queued", "preparing", "running", "grading"):
                    found: str = shown["status"]
                    return found
