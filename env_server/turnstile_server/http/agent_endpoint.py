"""Serves the agent app to sandboxes over HTTP: one listener per sandbox, one episode per listener.

Implements ``sandboxes.endpoint.AgentEndpoint``. It is written on asyncio's transports and protocols, because
uvicorn's HTTP protocol is an ``asyncio.Protocol``.
"""

from __future__ import annotations

import asyncio
import hmac
import os
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import cast

import orjson
import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.server import ServerState

from turnstile_server.http.listeners import BoundedHttp

_TOKEN_TIMEOUT_S = 10.0
"""Time for a new TCP connection to send its token; a tunnel sends it at once."""
_NOT_ADMITTED = orjson.dumps(
    {"error": {"type": "not_found", "message": "this sandbox's socket serves its own episode and nothing else"}}
)


class HttpAgentEndpoint:
    """Opens listeners that serve ``app``, the agent app.

    ``app`` None: no agent runs in these sandboxes, and every request is 404. ``max_connections``: per listener; a
    connection beyond it is closed at once. ``idle_connection_s``: idle keep-alive connections are closed after it.
    """

    def __init__(self, app: ASGIApp | None, *, idle_connection_s: float, max_connections: int) -> None:
        self._app = app
        self._idle_connection_s = idle_connection_s
        self._max_connections = max_connections

    async def listen_unix(self, path: Path) -> HttpEpisodeListener:
        """See ``AgentEndpoint``."""
        listener = self._listener()
        server = await asyncio.get_running_loop().create_unix_server(
            listener.accept, path=str(path), backlog=self._max_connections
        )
        listener.server = server
        try:
            os.chmod(path, 0o666)
        except OSError:
            await listener.close()
            raise
        return listener

    async def listen_tcp(self, host: str = "127.0.0.1") -> HttpEpisodeListener:
        """See ``AgentEndpoint``."""
        listener = self._listener()
        listener.server = await asyncio.get_running_loop().create_server(
            listener.accept_with_token, host=host, port=0, backlog=self._max_connections
        )
        return listener

    def _listener(self) -> HttpEpisodeListener:
        return HttpEpisodeListener(self._app, self._idle_connection_s, self._max_connections)


class HttpEpisodeListener:
    """An ``EpisodeListener``, and a ``TcpEpisodeListener`` where it listens on TCP."""

    def __init__(self, app: ASGIApp | None, idle_connection_s: float, max_connections: int) -> None:
        self.token = secrets.token_urlsafe(32)
        self.server: asyncio.Server | None = None
        self._filter = _EpisodeFilter(app)
        self._max_connections = max_connections
        self._state = ServerState()
        self._without_token: set[asyncio.Transport] = set()
        self._config = uvicorn.Config(
            self._filter,
            http=BoundedHttp,
            lifespan="off",
            ws="none",
            log_config=None,
            access_log=False,
            server_header=False,
            date_header=False,
            proxy_headers=False,
            timeout_keep_alive=int(idle_connection_s),
        )
        self._config.load()

    @property
    def address(self) -> tuple[str, int]:
        if self.server is None:
            raise RuntimeError("the listener is not open")
        host, port = self.server.sockets[0].getsockname()[:2]
        return str(host), int(port)

    def admit(self, episode_id: str | None) -> None:
        self._filter.episode_id = episode_id

    async def close(self) -> None:
        if self.server is not None:
            self.server.close()
        for waiting in list(self._without_token):
            waiting.abort()
        for connection in list(self._state.connections):
            # The app sees its client gone, as it does when an agent dies.
            if (transport := connection.transport) is not None:
                transport.abort()

    def accept(self) -> asyncio.Protocol:
        """The protocol of a new connection. Code in a sandbox can open more than the server has descriptors."""
        if self._full:
            return _Refusal()
        # The type of uvicorn's setting names no constructor.
        make = cast(Callable[..., asyncio.Protocol], self._config.http_protocol_class)
        return make(config=self._config, server_state=self._state, app_state={})

    def accept_with_token(self) -> asyncio.Protocol:
        return _Refusal() if self._full else _TokenCheck(self.token, self.accept, self._without_token)

    @property
    def _full(self) -> bool:
        return len(self._state.connections) + len(self._without_token) >= self._max_connections


class _EpisodeFilter:
    """An ASGI application: ``app``, for the paths of one episode."""

    def __init__(self, app: ASGIApp | None) -> None:
        self._app = app
        self.episode_id: str | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        # Reads the path as the app does: the id is what follows /e/ up to the next slash.
        own = self.episode_id is not None and scope["path"].startswith(f"/e/{self.episode_id}/")
        if self._app is not None and own:
            await self._app(scope, receive, send)
            return
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(_NOT_ADMITTED)).encode()),
        ]
        await send({"type": "http.response.start", "status": 404, "headers": headers})
        await send({"type": "http.response.body", "body": _NOT_ADMITTED})


class _Refusal(asyncio.Protocol):
    """Closes the connection at once."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport.close()


class _TokenCheck(asyncio.Protocol):
    """Reads the first line of a connection: the right token makes it HTTP, anything else ends it."""

    def __init__(
        self, token: str, accept: Callable[[], asyncio.Protocol], waiting: set[asyncio.Transport]
    ) -> None:
        self._token = token.encode()
        self._accept = accept
        self._waiting = waiting
        self._line = b""
        self._transport: asyncio.Transport | None = None
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._waiting.add(self._transport)
        self._timer = asyncio.get_running_loop().call_later(_TOKEN_TIMEOUT_S, self._transport.abort)

    def connection_lost(self, error: Exception | None) -> None:
        self._settle()

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
