"""HTTP to an engine: one session, typed errors, bounded waits.

Owns the session, its connections and the limit on calls in flight. What must hold: no exception of the HTTP
library leaves this module; a request is repeated only if its connection could not be opened, so no call can run
twice; time in which we hold the engine paused counts against no time-out.

The HTTP library (aiohttp) runs on asyncio; everything here is written with anyio.
"""

from __future__ import annotations

import math
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import aiohttp
import anyio

from turnstile_server.errors import EngineProtocolError, EngineTimeout, EngineUnavailable
from turnstile_server.settings import EngineSettings

KEEPALIVE_S: Final = 2.0
"""Idle connections are dropped well before uvicorn, SGLang's server, drops them (5 s). Otherwise a request could
be written to a connection that the server is closing."""

RETRY_PAUSE_S: Final = 0.1
DRAIN_S: Final = 0.5
"""Time to read the rest of a finished stream, so that its connection can be used again."""


class HoldClock:
    """Stops the deadlines of calls while we hold the engine paused; on release each has its whole limit again."""

    def __init__(self) -> None:
        self.held = False
        self.released_at = -math.inf
        self._limits: dict[anyio.CancelScope, float] = {}

    def hold(self) -> None:
        self.held = True
        for scope in self._limits:
            scope.deadline = math.inf

    def release(self) -> None:
        self.held = False
        self.released_at = anyio.current_time()
        for scope, limit_s in self._limits.items():
            scope.deadline = self.released_at + limit_s

    @contextmanager
    def watch(self, scope: anyio.CancelScope, limit_s: float) -> Iterator[None]:
        """Moves the deadline of ``scope`` with the pauses."""
        self._limits[scope] = limit_s
        try:
            yield
        finally:
            del self._limits[scope]


@dataclass(frozen=True, slots=True)
class Deadline:
    """``limit_s`` seconds from ``since`` (anyio's clock), not counting pauses of ``hold``."""

    since: float
    limit_s: float
    hold: HoldClock | None = None

    @contextmanager
    def scope(self) -> Iterator[anyio.CancelScope]:
        """A cancel scope that ends at the deadline; ``cancelled_caught`` then says so."""
        if self.hold is None:
            with anyio.CancelScope(deadline=self.since + self.limit_s) as scope:
                yield scope
            return
        since = max(self.since, self.hold.released_at)
        at = math.inf if self.hold.held else since + self.limit_s
        with anyio.CancelScope(deadline=at) as scope, self.hold.watch(scope, self.limit_s):
            yield scope


def trace_headers(traceparent: str | None) -> dict[str, str]:
    """W3C Trace Context for an engine that traces; none for a call that is in no trace."""
    return {} if traceparent is None else {"traceparent": traceparent}


@dataclass(frozen=True, slots=True)
class _EngineRequest:
    method: str
    path: str
    body: bytes | None
    headers: Mapping[str, str]


class EngineHttp:
    """The connection to the engine at ``url``; with ``unix_socket`` it connects there instead."""

    def __init__(self, url: str, settings: EngineSettings, *, unix_socket: Path | None = None) -> None:
        self.url = url.rstrip("/")
        self.hold = HoldClock()
        self._settings = settings
        self._unix_socket = unix_socket
        self._session: aiohttp.ClientSession | None = None
        self._waits: set[anyio.CancelScope] = set()
        self._slots = anyio.Semaphore(settings.max_connections)

    async def open(self) -> None:
        """Makes the session. Connections are opened when they are needed."""
        if self._session is not None:
            return
        # The connector has no limit of its own: aborts must pass when all slots are generating.
        connector: aiohttp.BaseConnector
        if self._unix_socket is not None:
            connector = aiohttp.UnixConnector(str(self._unix_socket), limit=0, keepalive_timeout=KEEPALIVE_S)
        else:
            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_S)
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=self._settings.connect_timeout_s)
        headers = {"Content-Type": "application/json"}
        if self._settings.api_key is not None:
            headers["Authorization"] = f"Bearer {self._settings.api_key.get_secret_value()}"
        self._session = aiohttp.ClientSession(
            connector=connector, timeout=timeout, headers=headers, cookie_jar=aiohttp.DummyCookieJar()
        )

    async def close(self) -> None:
        """Ends every request in flight with EngineUnavailable, then closes the connections."""
        session, self._session = self._session, None
        if session is None:
            return
        # Closing a session does not wake the tasks that wait for its responses.
        for scope in self._waits:
            scope.cancel()
        await session.close()

    async def request(
        self, method: str, path: str, body: bytes | None = None, *, timeout_s: float
    ) -> tuple[int, bytes]:
        """One control request: status and whole body. Raises EngineUnavailable, EngineTimeout."""
        deadline = Deadline(anyio.current_time(), timeout_s)
        response = await self._respond(_EngineRequest(method, path, body, {}), deadline)
        try:
            return response.status, await self.read_all(response, deadline)
        finally:
            _give_back(response)

    @asynccontextmanager
    async def call(self, path: str, body: bytes, headers: Mapping[str, str]) -> AsyncIterator[EngineReply]:
        """One generation: waits for a free slot, sends, and yields the reply as soon as its head has come."""
        async with self.place(), self.send(path, body, headers) as reply:
            yield reply

    @asynccontextmanager
    async def place(self) -> AsyncIterator[None]:
        """Waits for a free slot, and holds it."""
        async with self._slots:
            yield

    @asynccontextmanager
    async def send(self, path: str, body: bytes, headers: Mapping[str, str]) -> AsyncIterator[EngineReply]:
        """Sends one generation, with a slot held, and yields the reply as soon as its head has come."""
        deadline = Deadline(anyio.current_time(), self._settings.first_chunk_timeout_s, self.hold)
        response = await self._respond(_EngineRequest("POST", path, body, headers), deadline)
        try:
            yield EngineReply(self, response, deadline, self._settings.chunk_timeout_s)
        finally:
            _give_back(response)

    async def _respond(self, request: _EngineRequest, deadline: Deadline) -> aiohttp.ClientResponse:
        attempts = self._settings.connect_attempts
        for attempt in range(1, attempts + 1):
            try:
                return await self._send(request, deadline)
            except aiohttp.ServerTimeoutError as error:
                limit = self._settings.connect_timeout_s
                raise EngineUnavailable(
                    f"No connection to the engine at {self.url} within {limit:g} s."
                ) from error
            except aiohttp.ClientConnectorError as error:
                # Nothing was sent: the one failure that is safe to repeat.
                if attempt == attempts:
                    raise EngineUnavailable(f"The engine at {self.url} cannot be reached: {error}") from error
                await anyio.sleep(RETRY_PAUSE_S * attempt)
            except (aiohttp.ClientError, OSError) as error:
                raise _broken(error) from error
        raise AssertionError("connect_attempts is at least 1")

    async def _send(self, request: _EngineRequest, deadline: Deadline) -> aiohttp.ClientResponse:
        with self._waiting(deadline):
            return await self._open_session().request(
                request.method,
                f"{self.url}{request.path}",
                data=request.body,
                headers=request.headers,
                allow_redirects=False,
            )
        raise AssertionError("a wait that was cut off has raised")

    async def read_all(self, response: aiohttp.ClientResponse, deadline: Deadline) -> bytes:
        """The whole body. Raises EngineProtocolError above ``engine.max_reply_bytes``."""
        limit = self._settings.max_reply_bytes
        body = bytearray()
        while data := await self.read_some(response, deadline):
            body += data
            if len(body) > limit:
                raise EngineProtocolError(f"The engine's answer is larger than engine.max_reply_bytes ({limit}).")
        return bytes(body)

    async def read_some(self, response: aiohttp.ClientResponse, deadline: Deadline) -> bytes:
        """The next bytes; empty at the end."""
        self._open_session()
        try:
            with self._waiting(deadline):
                return await response.content.readany()
        except (aiohttp.ClientError, OSError) as error:
            raise _broken(error) from error
        raise AssertionError("a wait that was cut off has raised")

    @contextmanager
    def _waiting(self, deadline: Deadline) -> Iterator[None]:
        """Bounds a wait by ``deadline`` and by ``close``. Raises EngineTimeout, EngineUnavailable."""
        with deadline.scope() as scope:
            self._waits.add(scope)
            try:
                yield
            finally:
                self._waits.discard(scope)
        if scope.cancelled_caught:
            self._open_session()
            raise EngineTimeout(f"The engine sent nothing for {deadline.limit_s:g} s; the call was given up.")

    def _open_session(self) -> aiohttp.ClientSession:
        if self._session is None or self._session.closed:
            raise EngineUnavailable("The engine's client is closed.")
        return self._session


class EngineReply:
    """The reply to one call. ``status`` and ``content_type`` are known; the body is read on demand.

    ``chunk_timeout_s``: longest silence after the first bytes of the body.
    """

    def __init__(
        self, http: EngineHttp, response: aiohttp.ClientResponse, deadline: Deadline, chunk_timeout_s: float
    ) -> None:
        self.status = response.status
        self.content_type = response.content_type
        self._http = http
        self._response = response
        self._deadline = deadline
        self._chunk_timeout_s = chunk_timeout_s

    async def body(self) -> bytes:
        return await self._http.read_all(self._response, self._deadline)

    async def parts(self) -> AsyncGenerator[bytes]:
        """Bytes as they come, each within its time-out."""
        while data := await self._http.read_some(self._response, self._deadline):
            yield data
            self._deadline = replace(self._deadline, since=anyio.current_time(), limit_s=self._chunk_timeout_s)

    async def drain(self) -> None:
        """Reads the rest of a finished reply, for ``DRAIN_S`` at most."""
        with anyio.move_on_after(DRAIN_S) as scope:
            try:
                while await self._response.content.readany():
                    pass
            except (aiohttp.ClientError, OSError):
                self._response.close()
        if scope.cancelled_caught:
            self._response.close()


def _give_back(response: aiohttp.ClientResponse) -> None:
    """Gives a connection back, or closes it if its reply is unread, which shows the engine that we are gone."""
    if response.content.at_eof():
        response.release()
    else:
        response.close()


def _broken(error: Exception) -> EngineUnavailable:
    return EngineUnavailable(f"The connection to the engine broke: {type(error).__name__} {error}".rstrip())
