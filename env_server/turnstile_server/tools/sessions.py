"""The MCP sessions of one episode, and the HTTP requests in them.

``EpisodeSessions`` owns the SDK's session manager from the episode's first request to its end; when ``run``
returns, no request is left in it. ``McpRequest`` is one HTTP request: its body was read before, its sender is
watched, and its tool calls stop when it is over.

Holds: a tool call never outlives the request that asked for it, whether the sender hung up, takes no bytes, or the
episode ended. (MCP before 2026-07-28 lets a server go on after a disconnect so that a client may resume. This
endpoint keeps no events to resume from, so the work would be lost.)
"""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any

import anyio
from mcp.server.lowlevel import Server
from mcp.server.streamable_http_manager import StreamableHTTPSessionManager
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from turnstile_server.errors import Gone, TooManyCalls
from turnstile_server.settings import ToolSettings
from turnstile_server.tools.protocol import EpisodeTools

_SCOPE_KEY = "turnstile.mcp_request"
"""Where the ASGI scope that the SDK hands to a tool has its ``McpRequest``."""


class McpRequest:
    def __init__(self, episode: EpisodeTools, send_timeout_s: float) -> None:
        self.episode = episode
        self.started = False
        """A status was sent."""
        self.completed = False
        """The last bytes of the response were sent."""
        self.ended = False
        """The request was stopped because the episode ended."""
        self._send_timeout_s = send_timeout_s
        self._serving = anyio.CancelScope()
        self._calls: set[anyio.CancelScope] = set()
        self._over = False

    async def serve(self, app: ASGIApp, scope: Scope, body: bytes, receive: Receive, send: Send) -> None:
        """Has ``app`` respond to the request. Returns when it did, or when the request was stopped."""
        unread: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]
        left = anyio.Event()

        async def give() -> Message:
            if unread:
                return unread.pop()
            await left.wait()
            return {"type": "http.disconnect"}

        async def watch() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass
            left.set()
            # A server also says "disconnect" once the response is complete. The SDK handles a notification only
            # after it has responded to it, so a complete response stops nothing.
            if not self.completed:
                self._stop()

        async def put(message: MutableMapping[str, Any]) -> None:
            self.started = True
            self.completed = message["type"] == "http.response.body" and not message.get("more_body", False)
            with anyio.move_on_after(self._send_timeout_s) as sending:
                await send(message)
            if sending.cancelled_caught:
                self._stop()

        try:
            with self._serving:
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(watch)
                    await app({**scope, _SCOPE_KEY: self}, give, put)
                    tasks.cancel_scope.cancel()
        finally:
            self._stop()

    def episode_ended(self) -> None:
        """Stops the request and its tool calls."""
        self.ended = True
        self._stop()

    @contextmanager
    def running_call(self) -> Iterator[None]:
        """Around a tool call, in whichever task the protocol runs it.

        The block is cancelled when the request is over.
        """
        with anyio.CancelScope() as scope:
            if self._over:
                scope.cancel()
            self._calls.add(scope)
            try:
                yield
            finally:
                self._calls.discard(scope)

    def _stop(self) -> None:
        self._over = True
        self._serving.cancel()
        for call in list(self._calls):
            call.cancel()


def request_of(scope: Scope) -> McpRequest:
    """The request that a tool call came with."""
    request = scope[_SCOPE_KEY]
    assert isinstance(request, McpRequest)
    return request


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
        self._requests: set[McpRequest] = set()
        self._opened = anyio.Event()
        self._ended = False
        self._no_requests = anyio.Event()

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
        """Serves one request. Raises TooManyCalls, and Gone when the episode ended before any response began."""
        await self._opened.wait()
        most = self._settings.max_requests_per_episode
        if len(self._requests) >= most:
            raise TooManyCalls(
                f"the episode has {most} MCP requests in flight, its limit (tools.max_requests_per_episode)",
                retry_after_s=1.0,
            )
        if self._ended:
            raise _gone()
        request = McpRequest(episode, self._settings.send_timeout_s)
        self._requests.add(request)
        try:
            await request.serve(self._manager.handle_request, scope, body, receive, send)
        finally:
            self._requests.discard(request)
            if not self._requests:
                self._no_requests.set()
        if request.ended and not request.started:
            raise _gone()
        if request.ended and not request.completed:
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _stop_requests(self) -> None:
        """Stops every request with its tool calls, before the sessions are closed."""
        self._ended = True
        self._no_requests = anyio.Event()
        for request in list(self._requests):
            request.episode_ended()
        if self._requests:
            await self._no_requests.wait()


def _gone() -> Gone:
    return Gone("the episode has ended; its tools are gone")
