"""Plays the tasks of a world in whole episodes, without a model: the agent is a function that calls tools over
MCP.

For the tests of a world's author. A real server runs in this process for as long as it takes, on a temporary data
folder, without sandboxes unless the settings say otherwise; what it grades is what a training run would get.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio
import httpx2
import mcp
from mcp.client.streamable_http import streamable_http_client

from turnstile.models import Episode, EpisodeRequest, EpisodeStatus, TaskRef
from turnstile_server.settings import Settings
from turnstile_server.testing.policy import PolicyInput, Step
from turnstile_server.testing.server import ScriptedServer, scripted_server

WAIT_S = 120.0
"""Longest time that an episode may take to be prepared."""


@dataclass(frozen=True, slots=True)
class CallResult:
    """The result of a tool call, as the agent gets it."""

    text: str
    is_error: bool
    structured: Mapping[str, Any] | None

    @property
    def user(self) -> str | None:
        """The simulated user's reply to ``submit``; None: nothing, or no more."""
        said = (self.structured or {}).get("user")
        return said if isinstance(said, str) else None


@dataclass(frozen=True, slots=True)
class WorldAgent:
    """The argument of the function that plays the agent."""

    instruction: str
    tools: tuple[str, ...]
    """Names of the episode's tools."""
    _client: mcp.Client

    async def call(self, tool: str, /, **arguments: Any) -> CallResult:
        """Calls a tool."""
        result = await self._client.call_tool(tool, arguments)
        text = "\n".join(part.text for part in result.content if part.type == "text")
        return CallResult(text, bool(result.is_error), result.structured_content)

    async def submit(self, answer: str) -> CallResult:
        return await self.call("submit", answer=answer)


AgentFunction = Callable[[WorldAgent], Awaitable[object]]


class WorldServer:
    """A running server with the tasks of a world. Episodes may be played at the same time."""

    def __init__(self, server: ScriptedServer) -> None:
        self.server = server

    async def play(self, agent: AgentFunction, *, task: str | None = None, seed: int | None = None) -> Episode:
        """One episode from its creation to its grade. ``task``: an id; None: the first. ``seed`` None: the task's.

        What ``agent`` raises is raised, and the episode is cancelled.
        """
        chosen = task or next(iter(self.server.backends.tasks)).id
        created = await self.server.create(EpisodeRequest(task=TaskRef(id=chosen), seed=seed))
        at = f"/episodes/{created.episode_id}"
        try:
            episode = await self._running(created.episode_id)
            if not episode.status.ended:
                assert created.episode_key is not None
                instruction = episode.instruction or self.server.backends.tasks.get(chosen).instruction
                await play_agent(agent, instruction, created.tool_url or "", created.episode_key)
                await self.server.control.post(f"{at}/finish")
        except BaseException:
            with anyio.CancelScope(shield=True):
                await self.server.control.post(f"{at}/cancel")
            raise
        return await self.server.wait_for_end(created.episode_id)

    async def _running(self, episode_id: str) -> Episode:
        with anyio.fail_after(WAIT_S):
            while True:
                reply = await self.server.control.get(f"/episodes/{episode_id}", params={"wait": 1})
                episode = Episode.model_validate_json(reply.content)
                if episode.status not in (EpisodeStatus.QUEUED, EpisodeStatus.PREPARING):
                    return episode


async def play_agent(agent: AgentFunction, instruction: str, url: str, key: str) -> None:
    failure: Exception | None = None
    async with (
        httpx2.AsyncClient(headers={"authorization": f"Bearer {key}"}, timeout=WAIT_S) as http,
        mcp.Client(streamable_http_client(url, http_client=http)) as client,
    ):
        try:
            names = tuple(tool.name for tool in (await client.list_tools()).tools)
            await agent(WorldAgent(instruction, names, client))
        except Exception as error:  # noqa: BLE001 - raised below as it is; the client's task group would wrap it
            failure = error
    if failure is not None:
        raise failure


@asynccontextmanager
async def world_server(
    source: str | Path, settings: Mapping[str, Any] | None = None
) -> AsyncIterator[WorldServer]:
    """A server with the tasks of ``source``: a file, ``file.py:Class`` or ``module:Class``.

    ``settings``: further ones, nested as in a configuration file. Raises StartupError.
    """
    wanted: dict[str, Any] = {"sandboxes": {"kind": "none"}, "log_level": "warning", **(settings or {})}
    wanted["tasks"] = {**wanted.get("tasks", {}), "sources": (str(source),)}
    async with scripted_server(Settings(**wanted), _says_nothing) as server:
        yield WorldServer(server)


def play(
    source: str | Path,
    agent: AgentFunction,
    *,
    task: str | None = None,
    seed: int | None = None,
    settings: Mapping[str, Any] | None = None,
) -> Episode:
    """One episode on a server of its own, for tests that are not async. See ``world_server``,
    ``WorldServer.play``."""

    async def run() -> Episode:
        async with world_server(source, settings) as server:
            return await server.play(agent, task=task, seed=seed)

    return anyio.run(run)


def _says_nothing(call: PolicyInput) -> Step:
    return Step(text="The agent of this test is a function; it needs no model.")
