"""The MCP sessions of one episode.

``EpisodeSessions`` owns the SDK's session manager from the episode's first request to its end; when ``run``
returns, no request and no tool call is left in it.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any

import anyio
from mcp.server.lowlevel import Server
from mcp.server.streamable_http import LAST_EVENT_ID_HEADER, MCP_SESSION_ID_HEADER
from mcp.server.streamable_http_manager import StreamableHTTPSessionManager
from mcp.shared.inbound import MCP_PROTOCOL_VERSION_HEADER
from mcp_types.version import HANDSHAKE_PROTOCOL_VERSIONS
from starlette.datastructures import Headers
from starlette.types import Receive, Scope, Send

from turnstile_server.errors import Gone, InvalidRequest, MethodNotAllowed
from turnstile_server.settings import ToolSettings
from turnstile_server.tools.bounds import McpBounds
from turnstile_server.tools.events import CURRENT_EVENTS, CurrentSessionStore
from turnstile_server.tools.mcp_request import McpRequest, McpSession
from turnstile_server.tools.protocol import EpisodeTools

_MS_PER_S = 1000


class EpisodeSessions:
    def __init__(self, server: Server[Any], settings: ToolSettings) -> None:
        self._settings = settings
        self._bounds = settings.bounds_of(McpBounds)
        self._manager = StreamableHTTPSessionManager(
            server,
            event_store=CurrentSessionStore(),
            retry_interval=int(self._bounds.retry_s * _MS_PER_S),
            json_response=False,
            session_idle_timeout=self._bounds.session_idle_s,
            max_request_body_size=settings.max_body_bytes,
            max_sessions=self._bounds.max_sessions_per_episode,
        )
        self._sessions: dict[str, McpSession] = {}
        """By the SDK's session id."""
        self._requests: set[McpRequest] = set()
        self._opened = anyio.Event()
        self._ended = False
        self._no_requests = anyio.Event()

    @property
    def open(self) -> int:
        """Sessions that were opened and not closed."""
        return len(self._sessions)

    @property
    def in_flight(self) -> int:
        """Requests being served."""
        return len(self._requests)

    async def run(self, episode: EpisodeTools) -> None:
        """Serves until a stop of the episode is requested; closes on every path."""
        try:
            async with self._manager.run():
                self._opened.set()
                try:
                    await episode.stop_requested()
                finally:
                    with anyio.CancelScope(shield=True):
                        await self._stop_requests()
        finally:
            self._ended = True
            self._opened.set()

    async def serve(self, episode: EpisodeTools, scope: Scope, body: bytes, receive: Receive, send: Send) -> None:
        """Serves one request.

        Raises Gone when the episode ended before any response began; InvalidRequest for a stream
        that can no longer be resumed; MethodNotAllowed for a stream that would bring nothing.
        """
        await self._opened.wait()
        if self._ended:
            raise _gone()
        headers = Headers(scope=scope)
        session_id = headers.get(MCP_SESSION_ID_HEADER)
        session = self._session(headers, session_id)
        gets = scope["method"] == "GET"
        resumed = headers.get(LAST_EVENT_ID_HEADER) if gets else None
        if session is not None and resumed and not session.events.knows(resumed):
            raise InvalidRequest(
                f"the stream of event {resumed[:100]!r} cannot be resumed: it is of another session, or its "
                "result is no longer kept"
            )
        if gets and session is not None and session_id is not None:
            # MCP's answer where the server offers no stream. Clients stop asking then; after the end of a stream
            # that they could read they ask again, which older TypeScript clients do without end.
            if not resumed:
                raise _no_stream("this server sends nothing that answers no request")
            if session.events.is_complete(resumed):
                raise _no_stream("the client has every event of the stream")
        request = McpRequest(episode, session, self._settings, resumes=bool(resumed))
        self._requests.add(request)
        try:
            await self._handle(request, session_id, scope, body, receive, send)
        finally:
            self._requests.discard(request)
            if not self._requests:
                self._no_requests.set()
        if request.ended and not request.started:
            raise _gone()
        if (request.ended or request.parked) and not request.completed:
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    def _session(self, headers: Headers, session_id: str | None) -> McpSession | None:
        """The session of the request, a new one where it may open one; None where it has none."""
        if (
            headers.get(MCP_PROTOCOL_VERSION_HEADER, HANDSHAKE_PROTOCOL_VERSIONS[0])
            not in HANDSHAKE_PROTOCOL_VERSIONS
        ):
            return None
        return McpSession(self._settings) if session_id is None else self._sessions.get(session_id)

    async def _handle(
        self, request: McpRequest, session_id: str | None, scope: Scope, body: bytes, receive: Receive, send: Send
    ) -> None:
        session = request.session
        if session is None:
            await request.serve(self._manager.handle_request, scope, body, receive, send)
            return

        async def watched(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                self._note(scope["method"], session, session_id, message)
            await send(message)

        session.requests += 1
        token = CURRENT_EVENTS.set(session.events)
        try:
            scope = _with_version(scope, session.version)
            await request.serve(self._manager.handle_request, scope, body, receive, watched)
        finally:
            CURRENT_EVENTS.reset(token)
            session.requests -= 1
            session.used_at = anyio.current_time()

    def _note(
        self, method: str, session: McpSession, session_id: str | None, start: MutableMapping[str, Any]
    ) -> None:
        """Learns from a response that a session was opened or is over."""
        if session_id is not None:
            if start["status"] == 404 or (method == "DELETE" and start["status"] == 200):
                self._sessions.pop(session_id, None)
                session.events.close()
        elif start["status"] < 400:
            opened = Headers(raw=start["headers"]).get(MCP_SESSION_ID_HEADER)
            if opened is not None:
                self._forget_idle()
                self._sessions[opened] = session

    def _forget_idle(self) -> None:
        """Drops what is known of sessions that the SDK has closed, as it says nothing of it."""
        idle_since = anyio.current_time() - self._bounds.session_idle_s
        for session_id, session in list(self._sessions.items()):
            if not session.requests and not session.events.calls_running and session.used_at < idle_since:
                del self._sessions[session_id]

    async def _stop_requests(self) -> None:
        """Stops every request and every tool call, before the sessions are closed."""
        self._ended = True
        for session in self._sessions.values():
            session.events.stop_calls()
            session.events.close()
        self._no_requests = anyio.Event()
        for request in list(self._requests):
            request.episode_ended()
        if self._requests:
            await self._no_requests.wait()


def _no_stream(why: str) -> MethodNotAllowed:
    return MethodNotAllowed(f"there is no stream to GET here: {why}", ("POST", "DELETE"))


def _gone() -> Gone:
    return Gone("the episode has ended; its tools are gone")


def _with_version(scope: Scope, version: str | None) -> Scope:
    """The request in the protocol version of its session, whatever its header says; without a header the SDK would
    take the oldest one."""
    if version is None:
        return scope
    name = MCP_PROTOCOL_VERSION_HEADER.encode()
    others = [(key, value) for key, value in scope["headers"] if key.lower() != name]
    return {**scope, "headers": [*others, (name, version.encode())]}
