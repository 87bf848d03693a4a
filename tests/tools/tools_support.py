"""The MCP endpoint on a real port and a real Unix socket, in front of episodes that a test begins and ends."""

from __future__ import annotations

import socket
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AbstractContextManager, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anyio
import httpx2
from mcp import Client
from mcp.client.session import LoggingFnT
from mcp.client.streamable_http import streamable_http_client

from bounded import bounded
from turnstile.models import SpanKind
from turnstile_server.episodes.keys import EpisodeKeys, new_nonce
from turnstile_server.errors import Gone, NotFound, WrongKey
from turnstile_server.http.agent_app import AgentApp
from turnstile_server.http.intake import Intake
from turnstile_server.http.listeners import Listener, bind, url_of
from turnstile_server.http.origins import OriginRules
from turnstile_server.http.stopping import Stopping
from turnstile_server.http.wrong_keys import WrongKeys
from turnstile_server.sandboxes.protocol import Sandbox
from turnstile_server.settings import GateSettings, ToolSettings
from turnstile_server.spans import OpenSpan, SpanRecorder
from turnstile_server.tools.endpoint import McpEndpoint
from turnstile_server.tools.protocol import ServedTool
from turnstile_server.tools.toolbox import Toolbox
from waiting import PATIENCE_S

KEYS = EpisodeKeys(b"k" * 32)
LOCAL = OriginRules.of("gate", GateSettings())
"""The rules of a listener on a loopback address, where the settings say nothing."""


@dataclass
class PlayedEpisode:
    """Implements EpisodeTools."""

    episode_id: str
    sandbox: Sandbox | None
    key: str = ""
    answers: list[str] = field(default_factory=list)
    over: anyio.Event = field(default_factory=anyio.Event)
    user: Iterator[str] | None = None
    """What a simulated user says to each answer; None: there is no user."""
    own_tools: Sequence[ServedTool] = ()
    plain_tools: bool = False
    spans: SpanRecorder = field(default_factory=lambda: SpanRecorder(time.time(), 1000))

    def __post_init__(self) -> None:
        self.key = KEYS.key(self.episode_id, new_nonce())

    def recorded(self, tool: str, bytes_in: int) -> AbstractContextManager[OpenSpan]:
        return self.spans.span(SpanKind.TOOL, tool, bytes_in=bytes_in)

    @property
    def has_user(self) -> bool:
        return self.user is not None

    async def submit(self, answer: str) -> str | None:
        self.check_open()
        self.answers.append(answer)
        return next(self.user, None) if self.user is not None else None

    def check_open(self) -> None:
        if self.over.is_set():
            raise Gone("the episode has ended")

    async def stop_requested(self) -> None:
        await self.over.wait()

    def end(self) -> None:
        self.over.set()


class Episodes:
    """Implements ToolDirectory."""

    def __init__(self) -> None:
        self.episodes: dict[str, PlayedEpisode] = {}

    def begin(self, episode_id: str, sandbox: Sandbox | None) -> PlayedEpisode:
        episode = self.episodes[episode_id] = PlayedEpisode(episode_id, sandbox)
        return episode

    def open_tools(self, episode_id: str, key: str) -> PlayedEpisode:
        episode = self.episodes.get(episode_id)
        if episode is None:
            raise NotFound(f"there is no episode {episode_id}")
        if key != episode.key:
            raise WrongKey("the key does not open this episode")
        episode.check_open()
        return episode


@dataclass
class McpStage:
    url: str
    socket_path: Path
    episodes: Episodes
    endpoint: McpEndpoint
    toolbox: Toolbox

    def tool_url(self, episode: PlayedEpisode) -> str:
        return f"{self.url}/e/{episode.episode_id}/mcp"

    @asynccontextmanager
    async def client(
        self,
        episode: PlayedEpisode,
        *,
        mode: str = "legacy",
        key: str | None = None,
        unix: bool = False,
        logging_callback: LoggingFnT | None = None,
    ) -> AsyncIterator[Client]:
        """The official client, in the protocol era that ``mode`` names."""
        transport = httpx2.AsyncHTTPTransport(uds=str(self.socket_path)) if unix else None
        url = f"http://sandbox/e/{episode.episode_id}/mcp" if unix else self.tool_url(episode)
        headers = {"authorization": f"Bearer {key or episode.key}"}
        async with (
            httpx2.AsyncClient(headers=headers, transport=transport, timeout=PATIENCE_S) as http,
            Client(
                streamable_http_client(url, http_client=http), mode=mode, logging_callback=logging_callback
            ) as client,
        ):
            yield client


class _NoGate:
    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 418, "headers": []})
        await send({"type": "http.response.body", "body": b"the gate"})


@asynccontextmanager
async def mcp_stage(folder: Path, *, origins: OriginRules = LOCAL, **settings: Any) -> AsyncIterator[McpStage]:
    episodes = Episodes()
    limits = bounded(ToolSettings, **settings)
    toolbox = Toolbox(limits)
    tcp = bind("agent", "127.0.0.1", 0)
    path = folder / "agent.sock"
    unix = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    unix.bind(str(path))
    unix.listen(64)
    unix.setblocking(False)
    intake = Intake("gate", GateSettings())
    async with (
        McpEndpoint(episodes, toolbox, limits, origins, intake, Stopping(), WrongKeys()) as endpoint,
        anyio.create_task_group() as tasks,
    ):
        app = AgentApp(_NoGate(), endpoint)
        listeners = [Listener(app, bound, idle_s=5, grace_s=1, access_log=False) for bound in (tcp, unix)]
        for listener in listeners:
            tasks.start_soon(listener.serve)
        try:
            yield McpStage(url_of(tcp), path, episodes, endpoint, toolbox)
        finally:
            for episode in episodes.episodes.values():
                episode.end()
            for listener in listeners:
                listener.stop()
    for listener in listeners:
        listener.close()


def text_of(result: Any) -> str:
    """The one text of a tool's result."""
    (content,) = result.content
    text: str = content.text
    return text


def alive(pid: int) -> bool:
    """Whether the process runs (a zombie does not)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
