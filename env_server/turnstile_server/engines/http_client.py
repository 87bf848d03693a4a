"""HTTP to an engine: one session, typed errors, bounded waits.

Owns the session, its connections and the limit on calls in flight. What must hold: no exception of the HTTP
library leaves this module; a request is repeated only when the connection could not be opened, so no call can
run twice; time during which we hold the engine paused counts against no time-out.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

import aiohttp

from turnstile_server.errors import EngineProtocolError, EngineTimeout, EngineUnavailable
from turnstile_server.settings import EngineSettings

KEEPALIVE_S: Final = 2.0
"""Idle connections are dropped well before uvicorn, SGLang's server, drops them (5 s), so that none is found
closed after a request was already written to it."""

RETRY_PAUSE_S: Final = 0.1
DRAIN_S: Final = 0.5
"""Time to read the rest of a finished stream, so that its connection can be used again."""


@dataclass(slots=True)
class HoldClock:
    """Counts only the time in which the engine was not held paused by us."""

    held: bool = False
    released_at: float = field(default=float("-inf"))


@dataclass(frozen=True, slots=True)
class Deadline:
    """``limit_s`` seconds from ``since``; with ``hold``, not counting the time in which that clock was held."""

    since: float
    limit_s: float
    hold: HoldClock | None = None

    def left(self, now: float) -> float:
        if self.hold is None:
            return self.limit_s - (now - self.since)
        if self.hold.held:
            return self.limit_s
        return self.limit_s - (now - max(self.since, self.hold.released_at))


@dataclass(frozen=True, slots=True)
class _Request:
    method: str
    path: str
    body: bytes | None
    headers: Mapping[str, str]


class EngineHttp:
    """``unix_socket``: connect there instead of to the host of ``url``."""

    def __init__(self, url: str, settings: EngineSettings, *, unix_socket: Path | None = None) -> None:
        self.url = url.rstrip("/")
        self.hold = HoldClock()
        self._settings = settings
        self._unix_socket = unix_socket
        self._session: aiohttp.ClientSession | None = None
        self._sending: set[asyncio.Task[aiohttp.ClientResponse]] = set()
        self._reading: set[aiohttp.ClientResponse] = set()
        self._slots = asyncio.Semaphore(settings.max_connections)

    async def open(self) -> None:
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
        self._session = aiohttp.ClientSession(
            connector=connector, timeout=timeout, headers=headers, cookie_jar=aiohttp.DummyCookieJar()
        )

    async def close(self) -> None:
        """Ends every request under way with EngineUnavailable, then closes the connections."""
        session, self._session = self._session, None
        if session is None:
            return
        # Closing a session does not wake those who read from it.
        for task in self._sending:
            task.cancel()
        for response in self._reading:
            response.content.set_exception(aiohttp.ClientConnectionError("closed by us"))
        await session.close()

    async def request(
        self, method: str, path: str, body: bytes | None = None, *, timeout_s: float
    ) -> tuple[int, bytes]:
        """One control request: status and whole body. Raises EngineUnavailable, EngineTimeout."""
        deadline = Deadline(asyncio.get_running_loop().time(), timeout_s)
        response = await self._respond(_Request(method, path, body, {}), deadline)
        try:
            return response.status, await self._read_all(response, deadline)
        finally:
            self._leave(response)

    @asynccontextmanager
    async def call(self, path: str, body: bytes, headers: Mapping[str, str]) -> AsyncIterator[Reply]:
        """One generation: waits for a free slot, sends, and yields the reply as soon as its head is there."""
        async with self._slots:
            now = asyncio.get_running_loop().time()
            deadline = Deadline(now, self._settings.first_chunk_timeout_s, self.hold)
            response = await self._respond(_Request("POST", path, body, headers), deadline)
            try:
                yield Reply(self, response, deadline)
            finally:
                self._leave(response)

    async def _respond(self, request: _Request, deadline: Deadline) -> aiohttp.ClientResponse:
        attempts = self._settings.connect_attempts
        for attempt in range(1, attempts + 1):
            try:
                return await self._send(request, deadline)
            except aiohttp.ServerTimeoutError as error:
                limit = self._settings.connect_timeout_s
                raise EngineTimeout(f"No connection to the engine at {self.url} within {limit:g} s.") from error
            except aiohttp.ClientConnectorError as error:
                # Nothing was sent: the one failure that is safe to repeat.
                if attempt == attempts:
                    raise EngineUnavailable(f"The engine at {self.url} cannot be reached: {error}") from error
                await asyncio.sleep(RETRY_PAUSE_S * attempt)
            except (aiohttp.ClientError, OSError) as error:
                raise _lost(error) from error
        raise AssertionError("connect_attempts is at least 1")

    async def _send(self, request: _Request, deadline: Deadline) -> aiohttp.ClientResponse:
        if self._session is None or self._session.closed:
            raise EngineUnavailable("The engine's client is closed.")
        loop = asyncio.get_running_loop()
        task = loop.create_task(_head(self._session, f"{self.url}{request.path}", request))
        self._sending.add(task)
        try:
            while (left := deadline.left(loop.time())) > 0:
                done, _ = await asyncio.wait({task}, timeout=left)
                if not done:
                    continue
                if task.cancelled():
                    raise EngineUnavailable("The engine's client is closed.")
                response = task.result()
                self._reading.add(response)
                return response
            raise _silent(deadline.limit_s)
        except BaseException:
            task.add_done_callback(_close_late_response)
            task.cancel()
            raise
        finally:
            self._sending.discard(task)

    def _leave(self, response: aiohttp.ClientResponse) -> None:
        """Gives a connection back; that of an unread reply is closed, which tells the engine that we are gone."""
        self._reading.discard(response)
        if response.content.at_eof():
            response.release()
        else:
            response.close()

    async def _read_all(self, response: aiohttp.ClientResponse, deadline: Deadline) -> bytes:
        limit = self._settings.max_reply_bytes
        body = bytearray()
        while data := await self._read_some(response, deadline):
            body += data
            if len(body) > limit:
                raise EngineProtocolError(f"The engine's answer is larger than engine.max_reply_bytes ({limit}).")
        return bytes(body)

    async def _read_some(self, response: aiohttp.ClientResponse, deadline: Deadline) -> bytes:
        """The next bytes; empty at the end."""
        loop = asyncio.get_running_loop()
        while (left := deadline.left(loop.time())) > 0:
            try:
                async with asyncio.timeout(left):
                    return await response.content.readany()
            except TimeoutError:
                continue  # held meanwhile: the next round says how much is left
            except (aiohttp.ClientError, OSError) as error:
                raise _lost(error) from error
        raise _silent(deadline.limit_s)


class Reply:
    """The reply to one call. ``status`` and ``content_type`` are known, the body is read on demand."""

    def __init__(self, http: EngineHttp, response: aiohttp.ClientResponse, deadline: Deadline) -> None:
        self.status = response.status
        self.content_type = response.content_type
        self._http = http
        self._response = response
        self._deadline = deadline

    async def body(self) -> bytes:
        return await self._http._read_all(self._response, self._deadline)

    async def parts(self) -> AsyncGenerator[bytes]:
        """Bytes as they come, each within its time-out."""
        while data := await self._http._read_some(self._response, self._deadline):
            yield data
            now = asyncio.get_running_loop().time()
            self._deadline = replace(self._deadline, since=now, limit_s=self._http._settings.chunk_timeout_s)

    async def drain(self) -> None:
        """Reads what is left of a finished reply, for a moment at most."""
        try:
            async with asyncio.timeout(DRAIN_S):
                while await self._response.content.readany():
                    pass
        except (TimeoutError, aiohttp.ClientError, OSError):
            self._response.close()


async def _head(session: aiohttp.ClientSession, url: str, request: _Request) -> aiohttp.ClientResponse:
    return await session.request(
        request.method, url, data=request.body, headers=request.headers, allow_redirects=False
    )


def _close_late_response(task: asyncio.Future[aiohttp.ClientResponse]) -> None:
    if not task.cancelled() and task.exception() is None:
        task.result().close()


def _silent(timeout_s: float) -> EngineTimeout:
    return EngineTimeout(f"The engine sent nothing for {timeout_s:g} s; the call was given up.")


def _lost(error: Exception) -> EngineUnavailable:
    return EngineUnavailable(f"The connection to the engine broke: {type(error).__name__} {error}".rstrip())
