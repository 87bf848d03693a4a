"""The connections to one engine's server: opened when they are needed, kept for a while, closed together.

What must hold: a request is repeated only where its connection could not be opened; a connection that the server
has closed, or that was idle for ``KEEPALIVE_S``, gets no request; after ``close`` none is open.
"""

from __future__ import annotations

import asyncio
import base64
import socket
import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from urllib.parse import unquote, urlsplit

import aiohappyeyeballs

from turnstile_server.engines.http_connection import EngineConnection
from turnstile_server.errors import EngineUnavailable, TurnstileError

KEEPALIVE_S: Final = 2.0
"""Idle connections are dropped well before uvicorn, SGLang's server, drops them (5 s). Otherwise a request could
be written to a connection that the server is closing."""

DRAIN_S: Final = 0.5
"""Time for the rest of a finished stream to come, so that its connection can be used again."""

NEXT_ADDRESS_S: Final = 0.25
"""A host with several addresses that does not answer at one is tried at the next beside it (RFC 8305)."""


@dataclass(frozen=True, slots=True)
class HttpAddress:
    """The address to which a base URL leads. ``prefix``: the path before every path; ``authority``: as the Host
    header has it. ``credentials``: the Authorization header of a URL with a user in it."""

    host: str
    port: int
    prefix: str
    authority: str
    tls: bool
    credentials: str | None

    @classmethod
    def of(cls, url: str) -> HttpAddress:
        """Raises EngineUnavailable for what is no URL of a server."""
        try:
            parts = urlsplit(url)
            host, tls = (parts.hostname or "").encode("idna").decode("ascii"), parts.scheme == "https"
            port = parts.port or (443 if tls else 80)
        except ValueError as error:
            raise EngineUnavailable(f"{url} is not the address of an engine: {error}") from error
        if parts.scheme not in ("http", "https") or not host:
            raise EngineUnavailable(f"{url} is not the address of an engine: it is no http or https URL.")
        shown = f"[{host}]" if ":" in host else host
        user = f"{unquote(parts.username or '')}:{unquote(parts.password or '')}"
        return cls(
            host=host,
            port=port,
            prefix=parts.path.rstrip("/"),
            authority=shown if parts.port is None else f"{shown}:{port}",
            tls=tls,
            credentials=None if user == ":" else f"Basic {base64.b64encode(user.encode()).decode()}",
        )


class ConnectionPool:
    """With ``unix_socket`` the server is there, whatever its address says."""

    def __init__(self, unix_socket: Path | None) -> None:
        self._unix_socket = unix_socket
        self._tls: ssl.SSLContext | None = None
        self._idle: list[EngineConnection] = []
        """The one that was used last is at the end."""
        self._open: set[EngineConnection] = set()
        self._drained: dict[EngineConnection, asyncio.TimerHandle] = {}
        self._sweeping: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        """Open connections."""
        return len(self._open)

    def idle(self) -> EngineConnection | None:
        """A connection that is open and free, for one request; None: one must be opened."""
        now = asyncio.get_running_loop().time()
        while self._idle:
            connection = self._idle.pop()
            if connection.usable and now - connection.idle_since < KEEPALIVE_S:
                return connection
            connection.close()
        return None

    async def connect(self, address: HttpAddress) -> EngineConnection:
        """A new connection. Raises OSError where the server cannot be reached."""
        loop = asyncio.get_running_loop()
        tls, name = (self._context(), address.host) if address.tls else (None, None)
        if self._unix_socket is not None:
            _, connection = await loop.create_unix_connection(
                self._new, str(self._unix_socket), ssl=tls, server_hostname=name
            )
            return self._opened(connection)
        # Resolved and tried in the way of the HTTP library that sends the other requests.
        found = await loop.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
        opened = await aiohappyeyeballs.start_connection(found, happy_eyeballs_delay=NEXT_ADDRESS_S)
        try:
            _, connection = await loop.create_connection(self._new, sock=opened, ssl=tls, server_hostname=name)
        except BaseException:
            opened.close()
            raise
        return self._opened(connection)

    def _new(self) -> EngineConnection:
        return EngineConnection(self._gone, self._back)

    def _opened(self, connection: EngineConnection) -> EngineConnection:
        if not connection.usable:
            raise ConnectionResetError("it was closed as soon as it was open")
        self._open.add(connection)
        return connection

    def _context(self) -> ssl.SSLContext:
        if self._tls is None:
            self._tls = ssl.create_default_context()
        return self._tls

    def give_back(self, connection: EngineConnection, *, finished: bool) -> None:
        """The request is over. ``finished``: what its caller needs has come; the connection may wait for the end
        of the reply. Else one whose reply is unread is closed, which shows the engine that we are gone."""
        if connection.whole:
            self._back(connection)
        elif finished:
            connection.drain()
            loop = asyncio.get_running_loop()
            self._drained[connection] = loop.call_later(DRAIN_S, connection.close)
        else:
            connection.close()

    def _back(self, connection: EngineConnection) -> None:
        """Its reply is at its end."""
        timer = self._drained.pop(connection, None)
        if timer is not None:
            timer.cancel()
        if not connection.usable:
            connection.close()
            return
        loop = asyncio.get_running_loop()
        connection.release(loop.time())
        self._idle.append(connection)
        if self._sweeping is None:
            self._sweeping = loop.call_later(KEEPALIVE_S, self._sweep)

    def _gone(self, connection: EngineConnection) -> None:
        self._open.discard(connection)
        timer = self._drained.pop(connection, None)
        if timer is not None:
            timer.cancel()
        if connection in self._idle:
            self._idle.remove(connection)

    def _sweep(self) -> None:
        """Closes what was idle for too long."""
        loop = asyncio.get_running_loop()
        old = loop.time() - KEEPALIVE_S
        stale = [connection for connection in self._idle if connection.idle_since <= old]
        self._idle = self._idle[len(stale) :]
        for connection in stale:
            connection.close()
        self._sweeping = loop.call_at(self._idle[0].idle_since + KEEPALIVE_S, self._sweep) if self._idle else None

    def close(self, error: TurnstileError) -> None:
        """Ends the requests in flight with ``error``, and closes every connection."""
        if self._sweeping is not None:
            self._sweeping.cancel()
            self._sweeping = None
        self._idle = []
        for connection in list(self._open):
            connection.fail(error)
