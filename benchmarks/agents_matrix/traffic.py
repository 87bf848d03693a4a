"""Records the requests of agents: what each asked, in which order, and how it ended.

``TrafficRecorder`` is an ASGI application around the agent app. The request that is being served is in
``CURRENT``, a context variable. Tasks started for a request inherit it, so an engine knows which request it
answers.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from agents_matrix.recording import Said, What
from turnstile_server.http.exchange import split_path

KEYS = frozenset({"authorization", "x-api-key", "x-goog-api-key"})
"""Headers with the episode's key, which no recording keeps."""
TRANSPORT = frozenset(
    {"host", "connection", "content-length", "transfer-encoding", "accept-encoding", "traceparent", "tracestate"}
)
"""Headers of the connection, not of the request."""


@dataclass
class TracedRequest:
    """One request, filled in while it is served."""

    method: str
    path: str
    query: str
    headers: tuple[tuple[str, str], ...]
    body: bytearray = field(default_factory=bytearray)
    said: Said | None = None
    status: int = 0
    answer: bytearray = field(default_factory=bytearray)
    on_spoken: Callable[[], None] = lambda: None

    def spoke(self, said: Said) -> None:
        self.said = said
        self.on_spoken()


@dataclass
class EpisodeTraffic:
    """The requests of one episode, and the events in their order."""

    calls: list[TracedRequest] = field(default_factory=list)
    events: list[tuple[What, int]] = field(default_factory=list)
    keys: set[str] = field(default_factory=set)

    def add(self, heard: TracedRequest) -> int:
        self.calls.append(heard)
        return len(self.calls) - 1


CURRENT: ContextVar[TracedRequest | None] = ContextVar("CURRENT", default=None)


class TrafficRecorder:
    """Records the episodes that were named by ``record``; other requests pass unrecorded."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._episodes: dict[str, EpisodeTraffic] = {}

    def record(self, episode_id: str) -> EpisodeTraffic:
        return self._episodes.setdefault(episode_id, EpisodeTraffic())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        episode_id, path = split_path(scope["path"]) if scope["type"] == "http" else ("", "")
        traffic = self._episodes.get(episode_id)
        if traffic is None or path.rstrip("/") == "/mcp":
            await self._app(scope, receive, send)
        else:
            await _TracedExchange(traffic, scope, path, receive, send).run(self._app)


class _TracedExchange:
    def __init__(self, traffic: EpisodeTraffic, scope: Scope, path: str, receive: Receive, send: Send) -> None:
        headers = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in scope["headers"]]
        kept = tuple((name, value) for name, value in headers if name not in KEYS | TRANSPORT)
        traffic.keys |= {value.removeprefix("Bearer ") for name, value in headers if name in KEYS}
        self._traffic = traffic
        self._heard = TracedRequest(scope["method"], path, scope["query_string"].decode("latin-1"), kept)
        self._index: int | None = None
        self._heard.on_spoken = self._spoke
        self._over = False
        self._scope = scope
        self._receive = receive
        self._send = send

    async def run(self, app: ASGIApp) -> None:
        CURRENT.set(self._heard)
        try:
            await app(self._scope, self._hear, self._say)
        finally:
            if not self._over:
                self._note("gone")

    async def _hear(self) -> Message:
        message = await self._receive()
        if message["type"] == "http.request":
            self._heard.body += message.get("body", b"")
            if not message.get("more_body", False):
                self._asked()
        elif not self._over:
            self._note("gone")
        return message

    async def _say(self, message: Message) -> None:
        self._asked()  # a request that was answered before its body was read
        if message["type"] == "http.response.start":
            self._heard.status = message["status"]
        else:
            self._heard.answer += message.get("body", b"")
            if not message.get("more_body", False) and not self._over:
                self._note("ended")
        await self._send(message)

    def _asked(self) -> None:
        if self._index is None:
            self._index = self._traffic.add(self._heard)
            self._traffic.events.append(("asked", self._index))

    def _spoke(self) -> None:
        if self._index is not None:
            self._traffic.events.append(("spoke", self._index))

    def _note(self, what: What) -> None:
        self._over = True
        if self._index is not None:
            self._traffic.events.append((what, self._index))
