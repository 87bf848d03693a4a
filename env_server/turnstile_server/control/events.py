"""Server-sent events: each change of an episode's status, notices for whoever runs the server, and a comment after
a silence.

Each event has an id. A reader that comes back with the latest one (``Last-Event-ID``) is sent what it missed, or
``event: reset``: some of that is lost, so that it has to list the episodes again.

What must hold: one stream keeps at most one undelivered event (the owner of the subscription bounds the rest); a
reader that takes no bytes for ``send_timeout_s`` is disconnected; when the reader leaves, the subscription is
closed; at shutdown the stream ends in order. Format:
https://html.spec.whatwg.org/multipage/server-sent-events.html
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import AsyncExitStack

import anyio
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream
from fastapi import APIRouter, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from turnstile.models import explained
from turnstile_server.control.body import json_bytes, until_disconnect, until_set
from turnstile_server.control.bounds import ControlBounds
from turnstile_server.control.protocol import EpisodeEvent
from turnstile_server.http.bounds import ListenerBounds
from turnstile_server.settings import ControlSettings

_HEADERS = {"content-type": "text/event-stream", "cache-control": "no-store", "x-accel-buffering": "no"}


class EventStream(Response):
    """The response of ``GET /events``: ``event: episode`` with the episode as JSON in ``data``."""

    def __init__(
        self,
        episodes: AsyncIterator[EpisodeEvent],
        *,
        closing: anyio.Event,
        heartbeat_s: float,
        send_timeout_s: float,
    ) -> None:
        super().__init__(status_code=200, headers=_HEADERS)
        del self.headers["content-length"]
        self._episodes = episodes
        self._closing = closing
        self._heartbeat_s = heartbeat_s
        self._send_timeout_s = send_timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(until_disconnect, receive, tasks.cancel_scope)
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            dropped = await self._stream(send)
            if not dropped:
                await send({"type": "http.response.body", "body": b"", "more_body": False})
            tasks.cancel_scope.cancel()

    async def _stream(self, send: Send) -> bool:
        """Send until the subscription ends (False) or the reader is disconnected (True)."""
        into, events = anyio.create_memory_object_stream[EpisodeEvent](0)
        async with anyio.create_task_group() as tasks, events:
            # A task of its own reads the iterator, because a time-out around its next step would close it.
            tasks.start_soon(self._pump, into)
            frame: bytes | None = b": open\n\n"
            while frame is not None:
                with anyio.move_on_after(self._send_timeout_s) as sending:
                    await send({"type": "http.response.body", "body": frame, "more_body": True})
                if sending.cancelled_caught:
                    tasks.cancel_scope.cancel()
                    return True
                frame = await self._next_frame(events)
        return False

    async def _next_frame(self, events: MemoryObjectReceiveStream[EpisodeEvent]) -> bytes | None:
        """The next event, a comment after ``heartbeat_s`` without one, None at the end."""
        with anyio.move_on_after(self._heartbeat_s):
            try:
                return _frame(await events.receive())
            except anyio.EndOfStream:
                return None
        return b": \n\n"

    async def _pump(self, into: MemoryObjectSendStream[EpisodeEvent]) -> None:
        async with into, AsyncExitStack() as stack:
            if isinstance(self._episodes, AsyncGenerator):
                stack.push_async_callback(self._episodes.aclose)
            reading = await stack.enter_async_context(anyio.create_task_group())
            reading.start_soon(until_set, self._closing, reading.cancel_scope)
            async for episode in self._episodes:
                await into.send(episode)
            reading.cancel_scope.cancel()


def _frame(event: EpisodeEvent) -> bytes:
    """A place in the stream has an id and no data: readers note it, and are told of no event."""
    if event.lost is not None:
        what = b"event: reset\ndata: %b\n" % json_bytes({"reason": event.lost})
    elif event.notice is not None:
        what = b"event: notice\ndata: %b\n" % event.notice.model_dump_json().encode()
    elif event.episode is not None:
        what = b"event: episode\ndata: %b\n" % explained(event.episode).model_dump_json().encode()
    else:
        what = b""
    return b"id: %b\n%b\n" % (event.event_id.encode(), what)


def build_event_router(
    subscribe: Callable[[str | None], AsyncIterator[EpisodeEvent]], closing: anyio.Event, settings: ControlSettings
) -> APIRouter:
    """``GET /events``. ``subscribe``: the events behind the one with this id, else from now on."""
    router = APIRouter()

    @router.get("/events")
    async def events(request: Request) -> Response:
        await request.body()
        return EventStream(
            subscribe(request.headers.get("last-event-id")),
            closing=closing,
            heartbeat_s=settings.bounds_of(ControlBounds).heartbeat_s,
            send_timeout_s=settings.bounds_of(ListenerBounds).send_timeout_s,
        )

    return router
