"""One HTTP exchange with an agent: its path, key and bounded body, the response, and whether the agent is there.

The model API and the MCP endpoint both read requests with it. Holds: a body is read within its limits of size and
time, and after room for it was reserved (``intake``); a caller that takes no bytes for ``send_timeout_s`` is gone;
nothing is sent to a caller that is gone.
"""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import anyio
from starlette.types import Message, Receive, Scope, Send

from turnstile_server.errors import MethodNotAllowed, RequestTimeout, ServerStopping, TurnstileError, Unauthorized
from turnstile_server.http.bounds import ListenerBounds
from turnstile_server.http.connections import seat_of
from turnstile_server.http.intake import BodyLimits, BodyReader, Intake, Reservation, too_large

Header = tuple[bytes, bytes]
JSON: Header = (b"content-type", b"application/json")
_COUNT = re.compile(r"[0-9]{1,18}")
_LARGE_PART = 1 << 12
"""Bytes of a part of a body that is worth an object of its own."""


class CallerGone(Exception):
    """The agent closed the connection, or takes no more bytes."""


def split_path(path: str) -> tuple[str, str]:
    """``/e/{episode_id}/rest`` as (episode_id, ``/rest``); ("", path) for any other path."""
    if not path.startswith("/e/"):
        return "", path
    episode_id, slash, rest = path[3:].partition("/")
    return episode_id, slash + rest


def first_headers(scope: Scope) -> dict[str, str]:
    """The request's headers by lower-case name; of several with one name the first."""
    return {name.decode("latin-1"): value.decode("latin-1") for name, value in reversed(scope["headers"])}


def episode_key(headers: Mapping[str, str]) -> str:
    """The episode key, in any of the headers in which clients send theirs. Raises Unauthorized."""
    scheme, _, token = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer" and token:
        return token.strip()
    key = headers.get("x-api-key") or headers.get("x-goog-api-key")
    if not key:
        raise Unauthorized("no episode key: send it as a bearer token, x-api-key or x-goog-api-key")
    return key


def header_count(headers: Mapping[str, str], name: str) -> int | None:
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


class ReceivedBody:
    """The parts of a body as they come. Large ones are kept as they are, and copied once; small ones go into a
    growing buffer, because a list of them would cost a client that sends single bytes forty times as much."""

    def __init__(self) -> None:
        self._parts: list[bytes | bytearray] = []

    def add(self, part: bytes) -> None:
        if len(part) >= _LARGE_PART or not self._parts:
            self._parts.append(part)
        elif isinstance(last := self._parts[-1], bytearray):
            last += part
        elif len(last) < _LARGE_PART:
            self._parts[-1] = bytearray(last) + part
        else:
            self._parts.append(bytearray(part))

    def whole(self) -> bytes:
        parts = self._parts
        return parts[0] if len(parts) == 1 and isinstance(parts[0], bytes) else b"".join(parts)


class AgentExchange:
    """A request and its response. ``section``: the settings' section that ``limits`` come from; errors name it."""

    def __init__(
        self, scope: Scope, receive: Receive, send: Send, limits: BodyLimits, section: str, intake: Intake
    ) -> None:
        self.method: str = scope["method"]
        self.path: str = scope["path"]
        self.query: bytes = scope["query_string"]
        self.headers = first_headers(scope)
        self.declared_bytes = header_count(self.headers, "content-length")
        """Length of the body, where the client said it."""
        self.status: int | None = None
        """The status that was sent; None before."""
        self.gone = False
        """The caller went away."""
        self._seat = seat_of(scope)
        self._receive = receive
        self._send = send
        self._limits = limits
        self._bounds = limits.bounds_of(ListenerBounds)
        self._section = section
        self._intake = intake
        self._reservation: Reservation | None = None
        self._ending = False
        self._body_begun = False
        self._body_read = False
        self._too_slow = False

    def admit(self) -> None:
        """The request has shown its key: its connection makes way for no other."""
        if self._seat is not None:
            self._seat.admit()

    @contextmanager
    def reserving(self, owner: str) -> Iterator[None]:
        """Reserves room for the body, for the length of the block; ``body`` is called in it. As ``reserve``."""
        self.reserve(owner)
        try:
            yield
        finally:
            self.give_back()

    def reserve(self, owner: str) -> None:
        """Reserves room for the body until ``give_back``; ``body`` is called between the two. Raises TooManyBytes.

        ``owner``: whose limit of bytes it counts against, an episode's id.
        """
        declared = self.declared_bytes or 0
        room = declared if declared <= self._limits.max_body_bytes else 0  # ``body`` refuses it
        self._reservation = self._intake.reserve(owner, room, self._section)

    def give_back(self) -> None:
        """Gives back what ``reserve`` has reserved."""
        if self._reservation is not None:
            self._intake.give_back(self._reservation)

    async def body(self) -> bytes:
        """The whole body. Raises BodyTooLarge, RequestTimeout, TooManyBytes, CallerGone."""
        if self._reservation is None:
            raise RuntimeError("room for the body was not reserved")
        if (self.declared_bytes or 0) > self._limits.max_body_bytes:
            raise too_large(self._limits, self._section)
        if self._arrived():
            return await self._whole_body(self._reservation)
        reader = BodyReader(
            self._receive, self._reservation, self._intake, self._limits, self._section, self._arrived
        )
        received = ReceivedBody()

        def take(message: Message) -> bool:
            received.add(self._part(message))
            return not self._body_read

        try:
            await reader.rest(take)
        except RequestTimeout:
            self._too_slow = True
            raise
        return received.whole()

    async def _whole_body(self, reservation: Reservation) -> bytes:
        """A body that is there: nothing is waited for, so nothing of the clock is needed."""
        body = self._part(await self._receive())
        if not self._body_read:
            raise RuntimeError("a body that is whole came in parts")
        reservation.check()
        if len(body) > self._limits.max_body_bytes:
            raise too_large(self._limits, self._section)
        reservation.hold(len(body))
        reservation.arrived()
        return body

    def _arrived(self) -> bool:
        return self._seat is not None and self._seat.whole

    async def drain(self) -> None:
        """Reads and drops what is left of the body; at most ``body_stall_s``. Raises CallerGone.

        Call it before a reply that needs no body: a client that gets a reply while it still sends may see a reset
        connection instead of the status, and try again. A client that waits to be told to go on (``Expect``) is
        not: it sends nothing before the status.
        """
        waits = self.headers.get("expect", "").lower() == "100-continue" and not self._body_begun
        if waits or self._too_slow:
            return
        with anyio.move_on_after(min(self._intake.bounds.body_stall_s, self._bounds.body_timeout_s)):
            while not self._body_read:
                self._part(await self._receive())

    @contextmanager
    def watching(self, responding: anyio.CancelScope) -> Iterator[None]:
        """Cancels ``responding``, which the block is in, when the caller goes. As ``watch``."""
        stop = self.watch(responding)
        try:
            yield
        finally:
            stop()

    def watch(self, responding: anyio.CancelScope) -> Callable[[], object]:
        """Cancels ``responding`` when the caller goes, until what is returned is called. After the body was
        read."""

        def gone() -> None:
            # A connection may also close once the response is complete; the caller did not go then.
            if not self._ending:
                self.gone = True
                responding.cancel()

        if self._seat is not None:
            return self._seat.tell_when_closed(gone)
        # A server that is not ours tells it to who asks for more of the request.
        return asyncio.create_task(self._ask(gone)).cancel

    async def _ask(self, gone: Callable[[], None]) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        gone()

    async def start(self, status: int, headers: list[Header]) -> None:
        self.status = status
        await self._put({"type": "http.response.start", "status": status, "headers": headers})

    async def write(self, data: bytes) -> None:
        await self._put({"type": "http.response.body", "body": data, "more_body": True})

    async def end(self, data: bytes = b"") -> None:
        """Sends the terminal bytes. When it returns, the connection of a present caller has taken them."""
        await asyncio.sleep(0)  # the event loop notices a caller that just went
        await self._end(data)

    async def _end(self, data: bytes) -> None:
        self._ending = True
        await self._put({"type": "http.response.body", "body": data, "more_body": False})

    async def respond(self, status: int, data: bytes, headers: Sequence[Header] = ()) -> None:
        """Sends a whole response; its head and its body leave together."""
        length = (b"content-length", str(len(data)).encode())
        self.status = status
        await asyncio.sleep(0)  # as in ``end``
        await self._put({"type": "http.response.start", "status": status, "headers": [JSON, length, *headers]})
        await self._end(b"" if self.method == "HEAD" else data)

    async def refuse(self, error: TurnstileError, data: bytes, headers: list[Header] | None = None) -> None:
        """Responds with the error's status and ``data``.

        Does nothing when a status was sent before: then only a broken end can tell the caller.
        """
        if self.status is not None:
            return
        if not isinstance(error, ServerStopping):  # there is no time for the rest of the body
            await self.drain()
        headers = list(headers or [])
        if error.retry_after_s is not None:
            headers.append((b"retry-after", str(math.ceil(error.retry_after_s)).encode()))
        if isinstance(error, MethodNotAllowed):
            headers.append((b"allow", ", ".join(error.allowed).encode()))
        if error.status == 401:
            headers.append((b"www-authenticate", b'Bearer realm="turnstile episode"'))
        if not self._body_read:
            headers.append((b"connection", b"close"))  # the rest of the body will not be read
        await self.respond(error.status, data, headers)

    def _part(self, message: Message) -> bytes:
        if message["type"] == "http.disconnect":
            self.gone = True
            raise CallerGone
        self._body_begun = True
        self._body_read = not message.get("more_body", False)
        part: bytes = message.get("body", b"")
        return part

    async def _put(self, message: dict[str, object]) -> None:
        # A task whose next wait is always over already is never interrupted by its cancelled scope, and a send to
        # a closed connection returns at once: a reply that always has more to say would go on for ever.
        if self.gone:
            raise CallerGone
        if self._seat is not None and not self._seat.blocked:  # then it does not wait
            await self._send(message)
            return
        with anyio.move_on_after(self._bounds.send_timeout_s) as scope:
            await self._send(message)
        if scope.cancelled_caught:
            self.gone = True
            raise CallerGone
