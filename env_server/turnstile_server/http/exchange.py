"""One HTTP exchange with an agent: its path, key and bounded body, the response, and whether the agent is there.

The model API and the MCP endpoint both read requests with it. Holds: a body is read within its limits of size and
time; a caller that takes no bytes for ``send_timeout_s`` is gone; nothing is sent to a caller that is gone.
"""

from __future__ import annotations

import math
import re
from collections.abc import AsyncIterator
from typing import Protocol

import anyio
import anyio.lowlevel
from starlette.datastructures import Headers
from starlette.types import Receive, Scope, Send

from turnstile_server.errors import BodyTooLarge, RequestTimeout, TurnstileError, Unauthorized

Header = tuple[bytes, bytes]
JSON: Header = (b"content-type", b"application/json")
_COUNT = re.compile(r"[0-9]{1,18}")


class CallerGone(Exception):
    """The agent closed the connection, or takes no more bytes."""


class ExchangeLimits(Protocol):
    """The limits of a section of the settings: bytes and seconds."""

    @property
    def max_body_bytes(self) -> int: ...

    @property
    def body_timeout_s(self) -> float: ...

    @property
    def send_timeout_s(self) -> float: ...


def split_path(path: str) -> tuple[str, str]:
    """``/e/{episode_id}/rest`` as (episode_id, ``/rest``); ("", path) for any other path."""
    if not path.startswith("/e/"):
        return "", path
    episode_id, slash, rest = path[3:].partition("/")
    return episode_id, slash + rest


def episode_key(headers: Headers) -> str:
    """The episode key, in any of the headers in which clients send theirs. Raises Unauthorized."""
    scheme, _, token = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer" and token:
        return token.strip()
    key = headers.get("x-api-key") or headers.get("x-goog-api-key")
    if not key:
        raise Unauthorized("no episode key: send it as a bearer token, x-api-key or x-goog-api-key")
    return key


def header_count(headers: Headers, name: str) -> int | None:
    """The header ``name`` as a whole number; None where it is absent or not 1 to 18 ASCII digits.

    ``int`` alone would also read other alphabets' digits, and raise for some that ``str.isdigit`` accepts and for
    more than 4,300 digits.
    """
    value = headers.get(name, "")
    return int(value) if _COUNT.fullmatch(value) else None


def unbuffered(content_type: str) -> list[Header]:
    """Headers of a response whose parts proxies must pass on as they come."""
    return [
        (b"content-type", content_type.encode()),
        (b"cache-control", b"no-cache"),
        (b"x-accel-buffering", b"no"),
    ]


class AgentExchange:
    """A request and its response. ``section``: the settings' section that ``limits`` come from; errors name it."""

    def __init__(self, scope: Scope, receive: Receive, send: Send, limits: ExchangeLimits, section: str) -> None:
        self.method: str = scope["method"]
        self.path: str = scope["path"]
        self.query: bytes = scope["query_string"]
        self.headers = Headers(scope=scope)
        self.status: int | None = None
        """The status that was sent; None before."""
        self.gone = False
        """The caller went away."""
        self._receive = receive
        self._send = send
        self._limits = limits
        self._section = section
        self._ending = False
        self._body_read = False

    async def body(self) -> bytes:
        """The whole body. Raises BodyTooLarge, RequestTimeout, CallerGone.

        A body that is too large is drained before the error is raised, for the reason that ``drain`` gives.
        """
        limits, self._body_read = self._limits, True
        too_large = (header_count(self.headers, "content-length") or 0) > limits.max_body_bytes
        parts: list[bytes] = []
        size = 0
        with anyio.move_on_after(limits.body_timeout_s):
            async for part in self._parts():
                size += len(part)
                too_large = too_large or size > limits.max_body_bytes
                if too_large:
                    parts.clear()
                else:
                    parts.append(part)
            if not too_large:
                return b"".join(parts)
        if too_large:
            most = limits.max_body_bytes
            raise BodyTooLarge(f"the body is larger than {most} bytes ({self._section}.max_body_bytes)")
        raise RequestTimeout(
            f"the body did not arrive within {limits.body_timeout_s:g} s ({self._section}.body_timeout_s)"
        )

    async def drain(self) -> None:
        """Reads and drops the body if nothing has read it; at most ``body_timeout_s``. Raises CallerGone.

        Call it before a reply that needs no body: a client that gets a reply while it still sends may see a reset
        connection instead of the status, and try again.
        """
        if self._body_read:
            return
        with anyio.move_on_after(self._limits.body_timeout_s):
            async for _ in self._parts():
                pass

    async def watch(self, responding: anyio.CancelScope) -> None:
        """Cancels ``responding`` when the caller goes. Run it beside the response, after the body was read."""
        while not self._ending:
            message = await self._receive()
            # A server also says "disconnect" once the response is complete; the caller did not go then.
            if message["type"] == "http.disconnect" and not self._ending:
                self.gone = True
                responding.cancel()
                return

    async def start(self, status: int, headers: list[Header]) -> None:
        self.status = status
        await self._put({"type": "http.response.start", "status": status, "headers": headers})

    async def write(self, data: bytes) -> None:
        await self._put({"type": "http.response.body", "body": data, "more_body": True})

    async def end(self, data: bytes = b"") -> None:
        """Sends the terminal bytes. When it returns, the connection of a present caller has taken them."""
        await anyio.lowlevel.checkpoint()  # lets ``watch`` notice a caller that just went
        if self.gone:
            raise CallerGone
        self._ending = True
        await self._put({"type": "http.response.body", "body": data, "more_body": False})

    async def respond(self, status: int, data: bytes, headers: list[Header] | None = None) -> None:
        length = (b"content-length", str(len(data)).encode())
        await self.start(status, [JSON, length, *(headers or [])])
        await self.end(b"" if self.method == "HEAD" else data)

    async def refuse(self, error: TurnstileError, data: bytes, headers: list[Header] | None = None) -> None:
        """Responds with the error's status and ``data``.

        Does nothing when a status was sent before: then only a broken end can tell the caller.
        """
        if self.status is not None:
            return
        await self.drain()
        headers = list(headers or [])
        if error.retry_after_s is not None:
            headers.append((b"retry-after", str(math.ceil(error.retry_after_s)).encode()))
        if error.status == 401:
            headers.append((b"www-authenticate", b'Bearer realm="turnstile episode"'))
        if error.status in (408, 413):
            headers.append((b"connection", b"close"))  # the rest of the body will not be read
        await self.respond(error.status, data, headers)

    async def _parts(self) -> AsyncIterator[bytes]:
        more = True
        while more:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                self.gone = True
                raise CallerGone
            yield message.get("body", b"")
            more = message.get("more_body", False)

    async def _put(self, message: dict[str, object]) -> None:
        with anyio.move_on_after(self._limits.send_timeout_s) as scope:
            await self._send(message)
        if scope.cancelled_caught:
            self.gone = True
            raise CallerGone
