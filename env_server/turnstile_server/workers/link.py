"""Requests to one worker process, over its Unix socket.

aiohttp runs on asyncio; its connections are kept and used again. What must hold: a request that waits for a worker
that is being started waits ``workers.wait_s`` at most; a connection that breaks is told as what it is: the
worker died, and what it did of the request is not known.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import anyio
import orjson
from multidict import CIMultiDict
from yarl import URL

from turnstile_server.errors import TurnstileError, error_of_type
from turnstile_server.settings import WorkerSettings
from turnstile_server.workers.bounds import WorkerBounds
from turnstile_server.workers.child import WorkerChild

_SKIPPED = ("User-Agent", "Accept", "Accept-Encoding", "Content-Type")
"""Headers that aiohttp would add of its own."""
_BUFFER = 1 << 18


class WorkerRestarting(TurnstileError):
    """The worker process that has the episode is not there now."""

    status = 503
    type = "worker_restarting"
    retryable = True


class WorkerLink:
    """``key``: the control key, which the worker asks for as the server does; None: it asks for none."""

    def __init__(self, child: WorkerChild, path: Path, key: str | None, settings: WorkerSettings) -> None:
        self.child = child
        self.number = child.number
        self.path = path
        self._settings = settings
        self._bounds = settings.bounds_of(WorkerBounds)
        self._key = key
        self._session: aiohttp.ClientSession | None = None

    @property
    def session(self) -> aiohttp.ClientSession:
        """Connections to the worker. Used in the event loop only."""
        if self._session is None:
            connector = aiohttp.UnixConnector(str(self.path), limit=self._bounds.max_connections)
            self._session = self.made_session(connector)
        return self._session

    @staticmethod
    def made_session(connector: aiohttp.BaseConnector) -> aiohttp.ClientSession:
        """Without a limit of time of its own: callers have theirs."""
        return aiohttp.ClientSession(
            connector=connector,
            timeout=aiohttp.ClientTimeout(total=None, connect=None, sock_read=None),
            auto_decompress=False,
            skip_auto_headers=_SKIPPED,
            read_bufsize=_BUFFER,
            cookie_jar=aiohttp.DummyCookieJar(),
        )

    def url_of(self, target: str) -> URL:
        """``target``: path and query, as they are sent."""
        return URL(f"http://localhost{target}", encoded=True)

    @property
    def authorization(self) -> Mapping[str, str]:
        return {} if self._key is None else {"authorization": f"Bearer {self._key}"}

    async def wait_up(self) -> None:
        """Returns when the worker serves. Raises WorkerRestarting where that takes too long."""
        child = self.child
        if child.up.is_set():
            return
        with anyio.move_on_after(self._settings.wait_s):
            while child.given_up is None and not child.up.is_set():
                up = child.up
                await up.wait()
        if child.up.is_set():
            return
        if child.given_up is not None:
            raise WorkerRestarting(child.given_up)
        raise WorkerRestarting(f"worker {self.number} is being started again. Try again.", retry_after_s=1.0)

    @asynccontextmanager
    async def request(
        self, method: str, target: str, headers: Mapping[str, str] | CIMultiDict[str], body: Any = None
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """The response to one request, whose body is still to be read. ``target``: path and query, as they are
        sent.

        Raises WorkerRestarting where the worker is not there, or dies before the head of its answer."""
        await self.wait_up()
        try:
            response = await self.session.request(
                method, self.url_of(target), headers=headers, data=body, allow_redirects=False
            )
        except aiohttp.ClientError as error:
            raise self.broken(error) from error
        try:
            yield response
        finally:
            response.close() if not response.content.at_eof() else response.release()

    def broken(self, error: Exception) -> WorkerRestarting:
        return WorkerRestarting(
            f"worker {self.number} ended while it served this request ({type(error).__name__}); what it did of it "
            "is not known. Try again.",
            retry_after_s=1.0,
        )

    async def fetched(
        self, method: str, target: str, body: bytes | None = None, headers: Mapping[str, str] | None = None
    ) -> tuple[int, bytes]:
        """Status and body of one request of the process in front. Raises WorkerRestarting."""
        sent = {**self.authorization, "host": "localhost", **(headers or {})}
        if body is not None:
            sent["content-type"] = "application/json"
        async with self.request(method, target, sent, body) as response:
            try:
                return response.status, await response.read()
            except aiohttp.ClientError as error:
                raise self.broken(error) from error

    async def json(self, target: str) -> Any:
        """The JSON of a GET. Raises WorkerRestarting, and what the worker refuses it with."""
        status, body = await self.fetched("GET", target)
        if status != 200:
            raise relayed(status, body)
        return orjson.loads(body)

    async def renew(self) -> None:
        """Connections to an ended life of the worker are of no use."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def close(self) -> None:
        await self.renew()


def relayed(status: int, body: bytes) -> TurnstileError:
    """A worker's refusal as an error of the process in front: of the same type, with the same words."""
    try:
        told = orjson.loads(body)["error"]
        return error_of_type(str(told["type"]), str(told["message"]), detail=told.get("detail"))
    except (orjson.JSONDecodeError, KeyError, TypeError):
        return TurnstileError(f"a worker answered with {status}")
