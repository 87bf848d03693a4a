"""The MCP sessions of one episode: from its first request to its end.

Owns the SDK's session manager and every request that is in it; when ``run`` returns, none is left.
"""

from __future__ import annotations

from typing import Any

import anyio
from mcp.server.lowlevel import Server
from mcp.server.streamable_http_manager import StreamableHTTPSessionManager
from starlette.types import Receive, Scope, Send

from turnstile_server.errors import Gone, TooManyCalls
from turnstile_server.settings import ToolSettings
from turnstile_server.tools.protocol import EpisodeTools
from turnstile_server.tools.request import McpRequest


class EpisodeSessions:
    def __init__(self, server: Server[Any], settings: ToolSettings) -> None:
        self._settings = settings
        self._manager = StreamableHTTPSessionManager(
            server,
            json_response=False,
            session_idle_timeout=settings.session_idle_s,
            max_request_body_size=settings.max_body_bytes,
            max_sessions=settings.max_sessions_per_episode,
        )
        self._visits: set[McpRequest] = set()
        self._open = anyio.Event()
        self._ended = False
        self._nobody = anyio.Event()

    @property
    def requests(self) -> int:
        """In flight."""
        return len(self._visits)

    async def run(self, episode: EpisodeTools) -> None:
        """Serves until the episode has ended; closes on every path."""
        try:
            async with self._manager.run():
                self._open.set()
                try:
                    await episode.ended()
                finally:
                    with anyio.CancelScope(shield=True):
                        await self._dismiss()
        finally:
            self._ended = True
            self._open.set()

    async def serve(self, episode: EpisodeTools, scope: Scope, body: bytes, receive: Receive, send: Send) -> None:
        """Answers one request. Raises Gone when the episode ended before there was any answer, TooManyCalls."""
        await self._open.wait()
        most = self._settings.max_requests_per_episode
        if len(self._visits) >= most:
            raise TooManyCalls(
                f"the episode has {most} MCP requests in flight, its limit (tools.max_requests_per_episode)",
                retry_after_s=1.0,
            )
        if self._ended:
            raise _gone()
        visit = McpRequest(episode, self._settings.send_timeout_s)
        self._visits.add(visit)
        try:
            await visit.serve(self._manager.handle_request, scope, body, receive, send)
        finally:
            self._visits.discard(visit)
            if not self._visits:
                self._nobody.set()
        if visit.ended and not visit.answered:
            raise _gone()
        if visit.ended and not visit.completed:
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _dismiss(self) -> None:
        """Stops every request, with the calls they asked for, before the sessions go."""
        self._ended = True
        self._nobody = anyio.Event()
        for visit in list(self._visits):
            visit.episode_ended()
        if self._visits:
            await self._nobody.wait()


def _gone() -> Gone:
    return Gone("the episode has ended; its tools are gone")
