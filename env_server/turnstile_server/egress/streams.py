"""The two ends of a connection through the proxy: bytes that are counted and watched, and HTTP over them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import anyio
import h11
from anyio.abc import ByteStream

from turnstile.models.network import NetworkOutcome
from turnstile_server.egress.budget import NetworkBudget
from turnstile_server.egress.log import NetworkEntry
from turnstile_server.egress.refusal import NetworkRefused

READ_BYTES = 64 << 10
_BROKEN = (anyio.BrokenResourceError, anyio.ClosedResourceError)
HttpEvent = h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]


class IdleWatch:
    """Ends a block in which ``touch`` is not called for ``idle_s``."""

    def __init__(self, idle_s: float) -> None:
        self._idle_s = idle_s
        self._scope = anyio.CancelScope()

    def touch(self) -> None:
        self._scope.deadline = anyio.current_time() + self._idle_s

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Raises NetworkRefused."""
        self.touch()
        with self._scope:
            yield
        if self._scope.cancelled_caught:
            raise NetworkRefused(NetworkOutcome.IDLE, f"nothing was sent for {self._idle_s:g} s")


class MeteredStream:
    """A connection to a host: every byte is taken from the budget before it goes on."""

    def __init__(self, stream: ByteStream, budget: NetworkBudget, entry: NetworkEntry, watch: IdleWatch) -> None:
        self._stream = stream
        self._budget = budget
        self._entry = entry
        self._watch = watch

    async def send(self, data: bytes) -> None:
        """Raises NetworkRefused beyond the budget, and where the host cut the connection."""
        self._budget.take_up(len(data), self._entry)
        try:
            await self._stream.send(data)
        except _BROKEN:
            raise _reset() from None
        self._watch.touch()

    async def receive(self, max_bytes: int = READ_BYTES) -> bytes:
        """Raises NetworkRefused beyond the budget, and where the host cut the connection."""
        try:
            data = await self._stream.receive(max_bytes)
        except _BROKEN:
            raise _reset() from None
        self._budget.take_down(len(data), self._entry)
        self._watch.touch()
        return data

    async def send_eof(self) -> None:
        try:
            await self._stream.send_eof()
        except _BROKEN:
            raise _reset() from None


def _reset() -> NetworkRefused:
    return NetworkRefused(NetworkOutcome.UPSTREAM, "the host cut the connection")


class HttpEnd:
    """One side of an HTTP/1.1 connection, over ``stream``."""

    def __init__(self, stream: ByteStream | MeteredStream, role: type[h11.CLIENT | h11.SERVER], most: int) -> None:
        self._stream = stream
        self._http = h11.Connection(role, max_incomplete_event_size=most)
        self._room = most + 1
        """Bytes that are read at most, of a head its rest: h11 looks at its size only while it is not whole."""

    async def next(self) -> HttpEvent:
        """The next event; never NEED_DATA. Raises h11.RemoteProtocolError, and what the stream raises."""
        while True:
            event = self._http.next_event()
            if event is not h11.NEED_DATA:
                self._room = READ_BYTES
                return event
            try:
                data = await self._stream.receive(min(READ_BYTES, max(1, self._room)))
            except anyio.EndOfStream:
                data = b""
            self._room -= len(data)
            self._http.receive_data(data)

    async def send(self, event: h11.Event) -> None:
        data = self._http.send(event)
        if data:
            await self._stream.send(data)

    @property
    def may_respond(self) -> bool:
        """True if no response has begun, on the server's side."""
        return self._http.our_state in (h11.IDLE, h11.SEND_RESPONSE)

    @property
    def wants_continue(self) -> bool:
        """True if the client waits for ``100 Continue`` before it sends its body."""
        return bool(self._http.they_are_waiting_for_100_continue)

    @property
    def trailing(self) -> bytes:
        """The bytes that came after the request that opened a tunnel."""
        return bytes(self._http.trailing_data[0])
