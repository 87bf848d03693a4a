"""Serves the agent app to sandboxes over HTTP: one listener per sandbox, one episode per listener.

Implements ``sandboxes.endpoint.AgentEndpoint``. It is written on asyncio's transports and protocols, because
uvicorn's HTTP protocol is an ``asyncio.Protocol``.
"""

from __future__ import annotations

import asyncio
import hmac
import secrets
import socket
from collections.abc import Callable
from pathlib import Path
from typing import cast

import orjson
import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.server import ServerState

from turnstile_server.http.acceptor import Acceptor
from turnstile_server.http.connections import DEFAULT_LIMITS, ConnectionLimits, Connections, Seat
from turnstile_server.http.http_protocol import BoundedHttp
from turnstile_server.unix_streams import bound_for_sandbox

_TOKEN_TIMEOUT_S = 10.0
"""Time for a new TCP connection to send its token; a tunnel sends it at once."""
_NOT_ADMITTED = orjson.dumps(
    {"error": {"type": "not_found", "message": "this sandbox's socket serves its own episode and nothing else"}}
)


class HttpAgentEndpoint:
    """Opens listeners that serve ``app``, the agent app.

    ``app`` None, and none attached: no agent runs in these sandboxes, and every request is 404.
    ``max_connections``: per listener; ``limits``: of all listeners together, and of each connection.
    ``idle_connection_s``: idle keep-alive connections are closed after it.
    """

    def __init__(
        self,
        app: ASGIApp | None,
        *,
        idle_connection_s: float,
        max_connections: int,
        limits: ConnectionLimits = DEFAULT_LIMITS,
    ) -> None:
        self._app = app
        self._idle_connection_s = idle_connection_s
        self._max_connections = max_connections
        self.connections = Connections("the sandboxes", limits, per_owner=max_connections)
        """The connections of all sandboxes."""

    def attach(self, app: ASGIApp) -> None:
        """From now on all listeners serve ``app``: a backend is started before what serves its agents."""
        self._app = app

    async def listen_unix(self, path: Path) -> HttpEpisodeListener:
        """See ``AgentEndpoint``."""
        bound = bound_for_sandbox(path)
        try:
            bound.listen(self._max_connections)
        except OSError:
            bound.close()
            raise
        return self._listener(bound, with_token=False)

    async def listen_tcp(self, host: str = "127.0.0.1") -> HttpEpisodeListener:
        """See ``AgentEndpoint``."""
        family, kind, proto, _, address = (
            await asyncio.get_running_loop().getaddrinfo(host, 0, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        )[0]
        bound = socket.socket(family, kind, proto)
        try:
            bound.bind(address)
            bound.listen(self._max_connections)
        except OSError:
            bound.close()
            raise
        return self._listener(bound, with_token=True)

    def _listener(self, bound: socket.socket, *, with_token: bool) -> HttpEpisodeListener:
        return HttpEpisodeListener(
            lambda: self._app,
            self._idle_connection_s,
            self.connections,
            self._max_connections,
            bound,
            with_token=with_token,
        )


class HttpEpisodeListener:
    """An ``EpisodeListener``, and a ``TcpEpisodeListener`` where it listens on TCP. Owns ``bound``."""

    def __init__(
        self,
        app_now: Callable[[], ASGIApp | None],
        idle_connection_s: float,
        connections: Connections,
        max_connections: int,
        bound: socket.socket,
        *,
        with_token: bool,
    ) -> None:
        self.token = secrets.token_urlsafe(32)
        self._filter = _EpisodeFilter(app_now)
        self._connections = connections
        self._owner = f"a sandbox {id(self)}"
        self._bound = bound
        self._state = ServerState()
        self._without_token: set[asyncio.Transport] = set()
        self._config = uvicorn.Config(
            self._filter,
            interface="asgi3",  # the applications return coroutines: uvicorn looks for functions that are one
            lifespan="off",
            ws="none",
            log_config=None,
            access_log=False,
            server_header=False,
            date_header=False,
            proxy_headers=False,
            timeout_keep_alive=cast(int, idle_connection_s),  # ``call_later`` takes fractions
        )
        self._config.load()
        self._acceptor = Acceptor(
            bound,
            self._accept_with_token if with_token else self._accept,
            places=min(connections.limits.max_connections, max_connections),
        )
        self._acceptor.start()

    @property
    def address(self) -> tuple[str, int]:
        host, port = self._bound.getsockname()[:2]
        return str(host), int(port)

    def admit(self, episode_id: str | None) -> None:
        self._filter.episode_id = episode_id

    async def close(self) -> None:
        self._acceptor.close()
        self._bound.close()
        for waiting in list(self._without_token):
            waiting.abort()
        for connection in list(self._state.connections):
            # The app sees its client gone, as it does when an agent dies.
            if (transport := connection.transport) is not None:
                transport.abort()

    def _accept(self) -> asyncio.Protocol | None:
        seat = self._connections.take(self._owner)
        return None if seat is None else BoundedHttp(seat, self._config, self._state)

    def _accept_with_token(self) -> asyncio.Protocol | None:
        seat = self._connections.take(self._owner)
        if seat is None:
            return None
        return _TokenCheck(
            self.token, seat, lambda: BoundedHttp(seat, self._config, self._state), self._without_token
        )


class _EpisodeFilter:
    """An ASGI application: that of ``app_now``, for the paths of one episode."""

    def __init__(self, app_now: Callable[[], ASGIApp | None]) -> None:
        self._app_now = app_now
        self.episode_id: str | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        # Reads the path as the app does: the id is what follows /e/ up to the next slash.
        own = self.episode_id is not None and scope["path"].startswith(f"/e/{self.episode_id}/")
        if own and (app := self._app_now()) is not None:
            await app(scope, receive, send)
            return
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(_NOT_ADMITTED)).encode()),
        ]
        await send({"type": "http.response.start", "status": 404, "headers": headers})
        await send({"type": "http.response.body", "body": _NOT_ADMITTED})


class _TokenCheck(asyncio.Protocol):
    """Reads the first line of a connection: the right token makes it HTTP, anything else ends it."""

    def __init__(
        self, token: str, seat: Seat, accept: Callable[[], asyncio.Protocol], waiting: set[asyncio.Transport]
    ) -> None:
        self._token = token.encode()
        self._seat = seat
        self._accept = accept
        self._waiting = waiting
        self._line = b""
        self._transport: asyncio.Transport | None = None
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._waiting.add(self._transport)
        self._seat.opened(self._transport, self._transport.abort)
        self._seat.request_ended()
        self._timer = asyncio.get_running_loop().call_later(_TOKEN_TIMEOUT_S, self._transport.abort)

    def connection_lost(self, error: Exception | None) -> None:
        self._settle()
        self._seat.left()

    def data_received(self, data: bytes) -> None:
        transport = self._transport
        if transport is None or transport.is_closing():
            return
        self._line += data
        line, newline, rest = self._line.partition(b"\n")
        if not newline and len(line) <= len(self._token):
            return
        self._settle()
        if not newline or not hmac.compare_digest(line, self._token):
            transport.abort()
            return
        http = self._accept()
        transport.set_protocol(http)
        http.connection_made(transport)
        if rest and not transport.is_closing():
            http.data_received(rest)

    def _settle(self) -> None:
        if self._transport is not None:
            self._waiting.discard(self._transport)
        if self._timer is not None:
            self._timer.cancel()
