"""One HTTP request at the tool door: its body read before, its sender watched, its calls stopped when it is over.

Holds: a tool call never outlives the request that asked for it, whether the sender hung up, takes no bytes, or the
episode ended. (MCP before 2026-07-28 lets a server go on after a disconnect so that a client may resume; this door
keeps no events to resume from, so the work would be for nobody.)
"""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any

import anyio
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from turnstile_server.tools.protocol import EpisodeTools

_KEY = "turnstile.visit"


class McpRequest:
    def __init__(self, episode: EpisodeTools, send_timeout_s: float) -> None:
        self.episode = episode
        self.answered = False
        """A status was sent."""
        self.completed = False
        """The last of the answer was sent."""
        self.ended = False
        """It was stopped because the episode ended."""
        self._send_timeout_s = send_timeout_s
        self._request = anyio.CancelScope()
        self._calls: set[anyio.CancelScope] = set()
        self._over = False

    async def serve(self, app: ASGIApp, scope: Scope, body: bytes, receive: Receive, send: Send) -> None:
        """Has ``app`` answer the request; returns when it did or was stopped."""
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
            # A server also says "disconnect" once the answer is complete; the SDK takes in a notification after
            # it has answered it.
            if not self.completed:
                self._stop()

        async def put(message: MutableMapping[str, Any]) -> None:
            self.answered = True
            self.completed = message["type"] == "http.response.body" and not message.get("more_body", False)
            with anyio.move_on_after(self._send_timeout_s) as sending:
                await send(message)
            if sending.cancelled_caught:
                self._stop()

        try:
            with self._request:
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(watch)
                    await app({**scope, _KEY: self}, give, put)
                    tasks.cancel_scope.cancel()
        finally:
            self._stop()

    def episode_ended(self) -> None:
        self.ended = True
        self._stop()

    @contextmanager
    def working(self) -> Iterator[None]:
        """Around a tool call, in whichever task the protocol runs it: left early when the visit is over."""
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
        self._request.cancel()
        for call in list(self._calls):
            call.cancel()


def visit_of(scope: Scope) -> McpRequest:
    visit = scope[_KEY]
    assert isinstance(visit, McpRequest)
    return visit
