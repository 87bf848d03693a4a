"""Serves the agent app to sandboxes over HTTP: one listener per sandbox, one episode per listener.

Implements ``sandboxes.endpoint.AgentEndpoint``. It is written on asyncio's transports and protocols, because
uvicorn's HTTP protocol is an ``asyncio.Protocol``.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from pathlib import Path
from typing import cast

import orjson
import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.server import ServerState

from turnstile_server.http.acceptor import Acceptor
from turnstile_server.http.connections import DEFAULT_LIMITS, ConnectionLimits, Connections
from turnstile_server.http.http_protocol import BoundedHttp
from turnstile_server.unix_streams import bound_for_sandbox

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
        return HttpEpisodeListener(
            lambda: self._app, self._idle_connection_s, self.connections, self._max_connections, bound
        )


class HttpEpisodeListener:
    """An ``EpisodeListener``. Owns ``bound``."""

    def __init__(
        self,
        app_now: Callable[[], ASGIApp | None],
        idle_connection_s: float,
        connections: Connections,
        max_connections: int,
        bound: socket.socket,
    ) -> None:
        self._filter = _EpisodeFilter(app_now)
        self._connections = connections
        self._owner = f"a sandbox {id(self)}"
        self._bound = bound
        self._state = ServerState()
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
        places = min(connections.limits.max_connections, max_connections)
        self._acceptor = Acceptor(bound, self._accept, places=places)
        self._acceptor.start()

    def admit(self, episode_id: str | None) -> None:
        self._filter.episode_id = episode_id

    async def close(self) -> None:
        self._acceptor.close()
        self._bound.close()
        for connection in list(self._state.connections):
            # The app sees its client gone, as it does when an agent dies.
            if (transport := connection.transport) is not None:
                transport.abort()

    def _accept(self) -> asyncio.Protocol | None:
        seat = self._connections.take(self._owner)
        return None if seat is None else BoundedHttp(seat, self._config, self._state)


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
