"""One HTTP request to the MCP endpoint: its body was read before, its sender is watched.

Holds: a tool call outlives its request only where the client can come back for it, that is where it got the id of
an event of the call's stream; and then for ``resume_s`` at most (``events.py``). Otherwise it is stopped
when the sender hangs up or takes no bytes, and always when the episode ends.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any

import anyio
from mcp_types import LoggingLevel
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from turnstile_server.http.bounds import ListenerBounds
from turnstile_server.settings import ToolSettings
from turnstile_server.tools.bounds import McpBounds
from turnstile_server.tools.events import ResumableStream, SessionEvents
from turnstile_server.tools.protocol import EpisodeTools

_SCOPE_KEY = "turnstile.mcp_request"
"""Key of the ``McpRequest`` in the ASGI scope that the SDK hands to a tool."""
_EVENT_ID = re.compile(rb"^id: ", re.MULTILINE)


class McpSession:
    """The endpoint's record of a session, beside the SDK's."""

    def __init__(self, settings: ToolSettings) -> None:
        self.events = SessionEvents(settings)
        self.log_level: LoggingLevel = "info"
        self.version: str | None = None
        """The protocol version that was agreed on; None before."""
        self.requests = 0
        self.used_at = anyio.current_time()


class McpRequest:
    """``session``: None for a request of none (2026-07-28, or an id that is not known). ``resumes``: it asks for
    the rest of a stream."""

    def __init__(
        self, episode: EpisodeTools, session: McpSession | None, settings: ToolSettings, *, resumes: bool = False
    ) -> None:
        self.episode = episode
        self.session = session
        self.started = False
        """A status was sent."""
        self.completed = False
        """The last bytes of the response were sent."""
        self.ended = False
        """The request was stopped because the episode ended."""
        self.parked = False
        """Its stream was closed while a call runs; the client comes back for the rest."""
        self._settings = settings
        self._resume_s = settings.bounds_of(McpBounds).resume_s
        self._resumable = resumes and self._resume_s > 0
        """The client has the id of an event."""
        self._serving = anyio.CancelScope()
        self._calls: set[anyio.CancelScope] = set()
        self._streams: set[ResumableStream] = set()
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
                self._leave()

        async def put(message: MutableMapping[str, Any]) -> None:
            self.started = True
            self.completed = message["type"] == "http.response.body" and not message.get("more_body", False)
            with anyio.move_on_after(self._settings.bounds_of(ListenerBounds).send_timeout_s) as sending:
                await send(message)
            if sending.cancelled_caught:
                self._leave()
            elif self.session is not None and _EVENT_ID.search(message.get("body", b"")):
                self._resumable = self._resume_s > 0

        try:
            with self._serving:
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(watch)
                    tasks.start_soon(self._park)
                    await app({**scope, _SCOPE_KEY: self}, give, put)
                    tasks.cancel_scope.cancel()
        finally:
            self._leave()

    def episode_ended(self) -> None:
        """Stops the request and its tool calls."""
        self.ended = True
        self._stop()

    @contextmanager
    def running_call(self, request_id: str) -> Iterator[None]:
        """Around a tool call, in whichever task the protocol runs it.

        The block is cancelled when the request is over, unless the client can come back for the result and does.
        """
        with anyio.CancelScope() as scope:
            self._calls.add(scope)
            stream = None if self.session is None else self.session.events.stream(request_id)
            if stream is not None:
                stream.calls.add(scope)
                self._streams.add(stream)
                stream.attach()
            if self._over:
                self._leave()
            try:
                yield
            finally:
                self._calls.discard(scope)
                if stream is not None:
                    stream.calls.discard(scope)
                    if stream in self._streams:
                        self._streams.discard(stream)
                        stream.detach(self._resume_s)

    async def _park(self) -> None:
        """Closes the response of a call that runs long, so that no proxy has to keep it open."""
        after_s = self._settings.stream_max_s
        if after_s is None:
            return
        await anyio.sleep(after_s)
        if self._resumable:
            self.parked = True
            self._leave()

    def _leave(self) -> None:
        """The response ends here. Calls that the client can come back for go on for a time."""
        if not self._resumable or self.ended:
            self._stop()
            return
        self._over = True
        self._serving.cancel()
        streams, self._streams = self._streams, set()
        for stream in streams:
            stream.detach(self._resume_s)

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
