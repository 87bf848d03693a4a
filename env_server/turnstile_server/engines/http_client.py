"""HTTP to an engine: two ways, typed errors, bounded waits.

Generations go over connections of our own (``http_pool``), because they are most of what is sent and wait longest;
everything else (control, weights, health) over a session of aiohttp. Owns both, and the limit on calls in flight.
What must hold: no exception of an HTTP library leaves this module; a request is repeated only if its connection
could not be opened, so no call can run twice; time in which we hold the engine paused counts against no time-out.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Final

import aiohttp
import anyio

from turnstile_server.engines.bounds import EngineBounds
from turnstile_server.engines.deadlines import Deadline, HoldClock
from turnstile_server.engines.http_connection import EngineConnection, broken
from turnstile_server.engines.http_pool import KEEPALIVE_S, ConnectionPool, HttpAddress
from turnstile_server.errors import EngineProtocolError, EngineTimeout, EngineUnavailable
from turnstile_server.settings import EngineSettings

RETRY_PAUSE_S: Final = 0.1

JSON_TYPE: Final = "application/json"
UNKNOWN_TYPE: Final = "application/octet-stream"


def trace_headers(traceparent: str | None) -> dict[str, str]:
    """W3C Trace Context for an engine that traces; none for a call that is in no trace."""
    return {} if traceparent is None else {"traceparent": traceparent}


class EngineHttp:
    """The connection to the engine at ``url``; with ``unix_socket`` it connects there instead."""

    def __init__(self, url: str, settings: EngineSettings, *, unix_socket: Path | None = None) -> None:
        self.url = url.rstrip("/")
        self.hold = HoldClock()
        self._settings = settings
        self._bounds = settings.bounds_of(EngineBounds)
        self._unix_socket = unix_socket
        self._session: aiohttp.ClientSession | None = None
        self._waits: set[anyio.CancelScope] = set()
        self._slots = anyio.Semaphore(settings.max_connections, fast_acquire=True)
        self._pool = ConnectionPool(unix_socket)
        self._address: HttpAddress | None = None
        self._addressed = ""
        self._heads: dict[str, bytes] = {}
        """The beginnings of the heads of requests, by path."""

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
        headers = {"Content-Type": JSON_TYPE}
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
        self._pool.close(_closed())
        await session.close()

    # Control requests

    async def request(
        self, method: str, path: str, body: bytes | None = None, *, timeout_s: float
    ) -> tuple[int, bytes]:
        """One control request: status and whole body. Raises EngineUnavailable, EngineTimeout."""
        deadline = Deadline(anyio.current_time(), timeout_s)
        response = await self._respond(method, path, body, deadline)
        try:
            return response.status, await self._read_all(response, deadline)
        finally:
            # A connection whose reply is unread is closed, which shows the engine that we are gone.
            if response.content.at_eof():
                response.release()
            else:
                response.close()

    async def _respond(
        self, method: str, path: str, body: bytes | None, deadline: Deadline
    ) -> aiohttp.ClientResponse:
        attempts = self._bounds.connect_attempts
        for attempt in range(1, attempts + 1):
            try:
                with self._waiting(deadline):
                    return await self._open_session().request(
                        method, f"{self.url}{path}", data=body, allow_redirects=False
                    )
            except aiohttp.ServerTimeoutError as error:
                raise self._no_connection() from error
            except aiohttp.ClientConnectorError as error:
                await self._after_refusal(error, last=attempt == attempts, attempt=attempt)
            except (aiohttp.ClientError, OSError) as error:
                raise broken(f"{type(error).__name__} {error}".rstrip()) from error
        raise AssertionError("connect_attempts is at least 1")

    async def _read_all(self, response: aiohttp.ClientResponse, deadline: Deadline) -> bytes:
        limit = self._settings.max_reply_bytes
        body = bytearray()
        while data := await self._read_some(response, deadline):
            body += data
            if len(body) > limit:
                raise EngineProtocolError(f"The engine's answer is larger than engine.max_reply_bytes ({limit}).")
        return bytes(body)

    async def _read_some(self, response: aiohttp.ClientResponse, deadline: Deadline) -> bytes:
        self._open_session()
        try:
            with self._waiting(deadline):
                return await response.content.readany()
        except (aiohttp.ClientError, OSError) as error:
            raise broken(f"{type(error).__name__} {error}".rstrip()) from error
        raise AssertionError("a wait that was cut off has raised")

    # Generations

    @asynccontextmanager
    async def call(
        self, path: str, body: Sequence[bytes], headers: Mapping[str, str]
    ) -> AsyncIterator[EngineReply]:
        """One generation: waits for a free slot, sends, and yields the reply as soon as its head has come."""
        async with self.place(), self.send(path, body, headers) as reply:
            yield reply

    def place(self) -> anyio.Semaphore:
        """An async context manager that waits for a free slot, and holds it."""
        return self._slots

    def send(self, path: str, body: Sequence[bytes], headers: Mapping[str, str]) -> Sending:
        """An async context manager, to enter with a slot held: it sends one generation with the pieces of
        ``body``, and gives the reply as soon as its head has come. Raises EngineUnavailable, EngineTimeout."""
        return Sending(self, path, body, headers)

    async def post(self, path: str, body: Sequence[bytes], headers: Mapping[str, str]) -> EngineReply:
        """Sends one generation. The reply must be closed."""
        since = anyio.current_time()
        self._open_session()
        connection = self._pool.idle() or await self._connect(since)
        reply = EngineReply(connection, self._pool, self.hold, self._settings)
        try:
            self._open_session()  # it may have been closed while the connection was opened
            await reply.begin((self._head(path, body, headers), *body), since)
        except BaseException:
            reply.close()
            raise
        return reply

    async def _connect(self, since: float) -> EngineConnection:
        deadline = Deadline(since, self._settings.first_chunk_timeout_s, self.hold)
        attempts = self._bounds.connect_attempts
        for attempt in range(1, attempts + 1):
            try:
                with self._waiting(deadline):
                    with anyio.move_on_after(self._settings.connect_timeout_s):
                        return await self._pool.connect(self._where)
                    raise self._no_connection()
            except OSError as error:
                await self._after_refusal(error, last=attempt == attempts, attempt=attempt)
        raise AssertionError("connect_attempts is at least 1")

    @property
    def _where(self) -> HttpAddress:
        if self._address is None or self._addressed != self.url:
            self._address, self._addressed, self._heads = HttpAddress.of(self.url), self.url, {}
        return self._address

    def _head(self, path: str, body: Sequence[bytes], headers: Mapping[str, str]) -> bytes:
        where = self._where
        fixed = self._heads.get(path)
        if fixed is None:
            fixed = self._heads[path] = self._fixed_head(where, path)
        lines = "".join([f"{name}: {value}\r\n" for name, value in headers.items()])
        if lines.count("\n") != len(headers) or lines.count("\r") != len(headers) or "\0" in lines:
            raise ValueError("a header's value has a line break in it")
        return b"%b%bContent-Length: %d\r\n\r\n" % (fixed, lines.encode(), sum(map(len, body)))

    def _fixed_head(self, where: HttpAddress, path: str) -> bytes:
        key = self._settings.api_key
        lines = [
            f"POST {where.prefix}{path} HTTP/1.1",
            f"Host: {where.authority}",
            f"Content-Type: {JSON_TYPE}",
            "Accept: */*",
            "Accept-Encoding: identity",
            "User-Agent: turnstile",
        ]
        credentials = where.credentials if key is None else f"Bearer {key.get_secret_value()}"
        if credentials is not None:
            lines.append(f"Authorization: {credentials}")
        if any(mark in line for line in lines for mark in "\r\n\0"):
            raise ValueError("the engine's address or key has a line break in it")
        return "".join(f"{line}\r\n" for line in lines).encode()

    # Both

    def _no_connection(self) -> EngineUnavailable:
        limit = self._settings.connect_timeout_s
        return EngineUnavailable(f"No connection to the engine at {self.url} within {limit:g} s.")

    async def _after_refusal(self, error: Exception, *, attempt: int, last: bool) -> None:
        """Nothing was sent: the one failure that is safe to repeat."""
        if last:
            raise EngineUnavailable(f"The engine at {self.url} cannot be reached: {error}") from error
        await anyio.sleep(RETRY_PAUSE_S * attempt)

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
            raise _closed()
        return self._session


class Sending:
    """One generation under way: closed when the block ends, whatever has come of its reply."""

    def __init__(self, http: EngineHttp, path: str, body: Sequence[bytes], headers: Mapping[str, str]) -> None:
        self._http, self._path, self._body, self._headers = http, path, body, headers
        self._reply: EngineReply | None = None

    async def __aenter__(self) -> EngineReply:
        self._reply = await self._http.post(self._path, self._body, self._headers)
        return self._reply

    async def __aexit__(self, *_: object) -> None:
        if self._reply is not None:
            self._reply.close()


class EngineReply:
    """The reply to one call. ``status`` and ``content_type`` are known; the body is read on demand."""

    def __init__(
        self, connection: EngineConnection, pool: ConnectionPool, hold: HoldClock, settings: EngineSettings
    ) -> None:
        self.status = 0
        self.content_type = ""
        self._connection, self._pool, self._hold, self._settings = connection, pool, hold, settings
        self._limit_s = 0.0
        self._began = self._finished = self._closed = False
        self._loop = asyncio.get_running_loop()

    async def begin(self, pieces: Sequence[bytes], since: float) -> None:
        """Sends the request, and returns when the head of the reply has come."""
        self._within(since, self._settings.first_chunk_timeout_s)
        self._connection.send(pieces)
        await self._connection.head()
        self.status = self._connection.status
        self.content_type = self._connection.content_type or UNKNOWN_TYPE

    async def body(self) -> bytes:
        """The whole of it. Raises EngineProtocolError above ``engine.max_reply_bytes``."""
        return await self._connection.read_all(self._settings.max_reply_bytes)

    async def read(self) -> bytes:
        """The next bytes, all that are there at once; empty at the end. After the first ones each wait has
        ``engine.chunk_timeout_s``."""
        if self._began:
            self._within(self._loop.time(), self._settings.chunk_timeout_s)
        data = await self._connection.read()
        self._began = True
        return data

    def finish(self) -> None:
        """Nobody needs the rest of it: where it comes soon, its connection is used again."""
        self._finished = True

    def close(self) -> None:
        """The call is over. Safe to call twice."""
        if self._closed:
            return
        self._closed = True
        self._hold.leave(self._connection)
        self._pool.give_back(self._connection, finished=self._finished)

    def _within(self, since: float, limit_s: float) -> None:
        """Bounds each wait from now on. ``limit_s``: longest silence since ``since``, pauses not counted."""
        if limit_s != self._limit_s:
            self._limit_s = self._connection.limit_s = limit_s
            self._hold.follow(self._connection, limit_s)
        self._connection.deadline = self._hold.due(since, limit_s)


def _closed() -> EngineUnavailable:
    return EngineUnavailable("The engine's client is closed.")
