"""The events of MCP sessions, kept for clients that lose their connection and come back with ``Last-Event-ID``.

Events belong to streams; the stream of a call begins with its request and ends with its response. Holds: what is
kept is bounded in events, bytes and time, notifications go before responses; a resumed stream brings every event
after the named one that is still kept, then the new ones as they come, and ends with the response; a call that no
connection carries is stopped after ``resume_s``. Resuming is part of MCP up to 2025-11-25:
https://modelcontextprotocol.io/specification/2025-11-25/basic/transports#resumability-and-redelivery
"""

from __future__ import annotations

import math
import secrets
from contextvars import ContextVar
from dataclasses import dataclass, field

import anyio
from mcp.server.streamable_http import EventCallback, EventId, EventMessage, EventStore, StreamId
from mcp_types import JSONRPCError, JSONRPCMessage, JSONRPCResponse

from turnstile_server.settings import ToolSettings
from turnstile_server.tools.bounds import McpBounds


@dataclass(eq=False, slots=True)
class ResumableStream:
    """The events of one request, or those that answer none."""

    index: int
    stored: int = 0
    """Events so far; an event's number is the count with it."""
    ended_at: float | None = None
    changed: anyio.Event = field(default_factory=anyio.Event)
    calls: set[anyio.CancelScope] = field(default_factory=set)
    """The running tool calls whose response it will bring."""
    carriers: int = 0
    """Open responses that carry it to the client."""

    def attach(self) -> None:
        self.carriers += 1
        for call in self.calls:
            call.deadline = math.inf

    def detach(self, resume_s: float) -> None:
        """A carrier is gone. Without any, its calls end after ``resume_s``."""
        self.carriers -= 1
        if not self.carriers:
            for call in self.calls:
                call.deadline = anyio.current_time() + resume_s

    def wake(self) -> None:
        self.changed.set()
        self.changed = anyio.Event()


@dataclass(frozen=True, slots=True)
class _Kept:
    message: JSONRPCMessage
    size: int

    @property
    def is_response(self) -> bool:
        return isinstance(self.message, JSONRPCResponse | JSONRPCError)


class SessionEvents:
    """The events of one session."""

    def __init__(self, settings: ToolSettings) -> None:
        self._bounds = settings.bounds_of(McpBounds)
        self._prefix = secrets.token_hex(6)
        self._streams: dict[int, ResumableStream] = {}
        self._open: dict[StreamId, ResumableStream] = {}
        """Streams without their response, by request id. An id may be used again after its response."""
        self._kept: dict[tuple[int, int], _Kept] = {}
        """By stream and number, oldest first."""
        self._bytes = 0
        self._next = 0
        self._closed = False

    @property
    def calls_running(self) -> bool:
        return any(stream.calls for stream in self._streams.values())

    def stream(self, stream_id: StreamId) -> ResumableStream:
        """The stream of a request that has no response yet."""
        stream = self._open.get(stream_id)
        if stream is None:
            stream = self._open[stream_id] = self._streams[self._next] = ResumableStream(self._next)
            self._next += 1
        return stream

    def store(self, stream_id: StreamId, message: JSONRPCMessage | None) -> EventId:
        """Keeps an event; gives its id. ``message`` None is the event without data that a request's stream begins
        with, by which a client can resume before anything else came."""
        if message is None and (replaced := self._open.pop(stream_id, None)) is not None:
            # Its id is used again, so no response will be known as its own.
            replaced.ended_at = anyio.current_time()
        stream = self.stream(stream_id)
        stream.stored += 1
        if message is not None:
            kept = _Kept(message, len(message.model_dump_json()))
            self._kept[stream.index, stream.stored] = kept
            self._bytes += kept.size
            if kept.is_response:
                stream.ended_at = anyio.current_time()
                del self._open[stream_id]
        self._trim()
        stream.wake()
        return f"{self._prefix}.{stream.index}.{stream.stored}"

    def knows(self, event_id: EventId) -> bool:
        """True if a stream can be resumed after the event."""
        return self._place(event_id) is not None

    def is_complete(self, event_id: EventId) -> bool:
        """True if nothing comes after the event: its stream has ended, and the client had all that is kept."""
        place = self._place(event_id)
        if place is None:
            return False
        stream, number = place
        return stream.ended_at is not None and all(at[0] != stream.index or at[1] <= number for at in self._kept)

    async def replay(self, event_id: EventId, send: EventCallback) -> None:
        """Sends what came after the event, and what comes, until the response. Returns early when the session is
        closed, and when the response is no longer kept."""
        place = self._place(event_id)
        if place is None:
            return
        stream, number = place
        stream.attach()
        try:
            while True:
                changed = stream.changed
                for at in [at for at in self._kept if at[0] == stream.index and at[1] > number]:
                    kept = self._kept.get(at)
                    if kept is None:
                        continue  # given up while another was sent
                    number = at[1]
                    await send(EventMessage(kept.message, f"{self._prefix}.{stream.index}.{number}"))
                    if kept.is_response:
                        return
                if self._closed or stream.ended_at is not None:
                    return
                await changed.wait()
        finally:
            stream.detach(self._bounds.resume_s)

    def stop_calls(self) -> None:
        for stream in self._streams.values():
            for call in stream.calls:
                call.cancel()

    def close(self) -> None:
        """Ends resumed streams; the session is over."""
        self._closed = True
        for stream in self._streams.values():
            stream.wake()

    def _place(self, event_id: EventId) -> tuple[ResumableStream, int] | None:
        prefix, _, rest = event_id.partition(".")
        index, _, number = rest.partition(".")
        if prefix != self._prefix or not (_is_count(index) and _is_count(number)):
            return None
        stream = self._streams.get(int(index))
        return None if stream is None or int(number) > stream.stored else (stream, int(number))

    def _trim(self) -> None:
        expired = anyio.current_time() - self._bounds.keep_events_s
        for stream in [*self._streams.values()]:
            if stream.ended_at is not None and stream.ended_at < expired and not stream.carriers:
                self._forget(stream.index)
        while len(self._kept) > self._bounds.max_events or self._bytes > self._bounds.max_event_bytes:
            at = next((at for at, kept in self._kept.items() if not kept.is_response), next(iter(self._kept)))
            if self._kept[at].is_response:
                self._forget(at[0])
            else:
                self._bytes -= self._kept.pop(at).size

    def _forget(self, index: int) -> None:
        """A stream whose response is given up cannot be resumed any more."""
        del self._streams[index]
        for at in [at for at in self._kept if at[0] == index]:
            self._bytes -= self._kept.pop(at).size


CURRENT_EVENTS: ContextVar[SessionEvents] = ContextVar("turnstile_mcp_events")
"""The events of the session that a task works for. The SDK hands its store a stream's id alone, which is the
client's own request id and the same in many sessions; it starts a session's tasks in the context of the request
that opens the session."""


class CurrentSessionStore(EventStore):
    """The SDK's store: that of the session which the calling task works for."""

    async def store_event(self, stream_id: StreamId, message: JSONRPCMessage | None) -> EventId:
        return CURRENT_EVENTS.get().store(stream_id, message)

    async def replay_events_after(self, last_event_id: EventId, send_callback: EventCallback) -> StreamId | None:
        """Follows the stream to its end. So there is no stream that the SDK would have to go on with: between its
        own replay and its going on, events would be lost."""
        await CURRENT_EVENTS.get().replay(last_event_id, send_callback)
        return None


def _is_count(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) <= 18
