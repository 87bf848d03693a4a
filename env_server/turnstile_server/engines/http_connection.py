"""One connection to an engine's server, with one request at a time: HTTP/1.1 over an asyncio transport.

Bytes of a reply go from the socket through llhttp (``httptools``) into a list; the caller that waits for them is
woken once, however many pieces came. What must hold: every wait ends by bytes, the end of the reply, its time-out,
``fail`` or the loss of the connection, whichever comes first; a reply counts as whole only where HTTP says so; a
connection serves a second request only after a whole reply, and not where anything came after it.

Written with asyncio, whose transports it is a protocol of. A wait is one future and no cancel scope: a
cancellation ends it, and its caller then closes the connection (``http_pool``).
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from typing import Final, cast

import httptools

from turnstile_server.errors import EngineProtocolError, EngineTimeout, EngineUnavailable, TurnstileError

HEAD_BYTES: Final = 1 << 16
"""Most bytes of the head of a reply."""

BUFFERED_BYTES: Final = 1 << 18
"""With so much of a streamed reply unread, no more is read from the socket until somebody takes it."""


class EngineConnection(asyncio.Protocol):
    """``ended``: called once, when the connection is lost or closed; ``free``: when a reply that ``drain`` waits
    for is whole."""

    def __init__(
        self, ended: Callable[[EngineConnection], None], free: Callable[[EngineConnection], None]
    ) -> None:
        self.idle_since = 0.0
        """When it was given back (the loop's clock)."""
        self.status = 0
        self.content_type = ""
        """The content type of the reply, known once ``head`` has returned."""
        self.limit_s = math.inf
        """The time-out that ``deadline`` stands for, for the error."""
        self._ended, self._free = ended, free
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._lost = False
        # The request in flight
        self._busy = False
        self._draining = False
        self._headed = self._whole = self._surplus = False
        self._interim = False
        """The message that is read says only that the reply is to come (a status of 1xx)."""
        self._framed = False
        """The reply says how long it is; else it lasts until the server closes the connection."""
        self._head_bytes = 0
        self._parts: list[bytes] = []
        self._size = 0
        self._paused = False
        self._wanted = 0
        """The reader wants the whole body, of so many bytes at most; 0: it wants what comes."""
        self._error: TurnstileError | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._deadline = math.inf
        self._timer: asyncio.TimerHandle | None = None

    # The transport's side

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's derive from no class of asyncio

    def data_received(self, data: bytes) -> None:
        if not self._busy:  # nobody has asked anything: the server gives up, or is out of step
            self.close()
            return
        if not self._headed:
            self._head_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._surplus = True
            if not self._whole:
                self._break(f"its answer is not HTTP ({type(error).__name__} {error})")
        if self._size > self._wanted:  # a chunk that comes has many parts, for a reader that is woken once
            self._wake()
        if self._head_bytes > HEAD_BYTES and not self._headed:
            self._break(f"the head of its answer is longer than {HEAD_BYTES} bytes")
        if self._draining and (self._whole or self._surplus):
            self._free(self)

    def connection_lost(self, error: Exception | None) -> None:
        if self._lost:
            return
        self._lost = True
        if self._busy and not self._whole and self._error is None:
            if error is None and self._headed and not self._framed:
                self._whole = True
            else:
                said = f"{type(error).__name__} {error}" if error else "it was closed before its answer was whole"
                self._error = broken(said)
        self._wake()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._ended(self)

    # The parser's side: what it calls for a message

    def on_message_begin(self) -> None:
        self._surplus = self._surplus or self._whole

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._headed:
            return
        match name.lower():
            case b"content-type":
                self.content_type = value.partition(b";")[0].strip().lower().decode("latin-1")
            case b"content-length" | b"transfer-encoding":
                self._framed = True

    def on_headers_complete(self) -> None:
        if self._whole:
            return
        self.status = self._parser.get_status_code()
        self._interim = 100 <= self.status < 200 and self.status != 101
        if self._interim:
            self.content_type, self._framed = "", False
        else:
            self._headed = True
            self._wake()

    def on_body(self, data: bytes) -> None:
        if self._whole or self._draining:
            return
        self._parts.append(data)
        self._size += len(data)
        if not self._wanted and self._size > BUFFERED_BYTES and not self._paused and self._transport is not None:
            self._paused = True
            self._transport.pause_reading()

    def on_message_complete(self) -> None:
        if self._interim:
            self._interim = False
            return
        if not self._whole:
            self._whole = True
            self._surplus = self._surplus or not self._parser.should_keep_alive()
            self._wake()

    # The caller's side

    @property
    def usable(self) -> bool:
        """It can take a request, or another one."""
        transport = self._transport
        return (
            (self._whole or not self._busy)
            and not (self._lost or self._surplus)
            and self._error is None
            and transport is not None
            and not transport.is_closing()
            and not transport.get_write_buffer_size()
        )

    @property
    def deadline(self) -> float:
        """When the wait for the next bytes ends (the loop's clock). It counts only while somebody waits."""
        return self._deadline

    @deadline.setter
    def deadline(self, value: float) -> None:
        self._deadline = value
        if self._waiter is not None:
            self._arm()

    def send(self, pieces: Sequence[bytes]) -> None:
        """Begins a request: its head and its body, in pieces. They are handed over at once, without a copy where
        the transport can; what the server does not take yet waits in the transport, and an answer that comes
        before all is written is read."""
        assert self._transport is not None
        assert not self._busy
        self._busy = True
        self._transport.writelines(pieces)

    async def head(self) -> None:
        """Returns when ``status`` and ``content_type`` are known. Raises EngineUnavailable, EngineTimeout."""
        while not self._headed:
            await self._news()

    async def read(self) -> bytes:
        """All of the body that has come, and b"" at its end. Raises EngineUnavailable, EngineTimeout."""
        self._wanted = 0
        while not self._parts:
            if self._whole and self._error is None:
                return b""
            await self._news()
        return self._take()

    async def read_all(self, limit: int) -> bytes:
        """The whole body. Raises EngineProtocolError above ``limit`` bytes, EngineUnavailable, EngineTimeout."""
        self._wanted = limit
        while (not self._whole or self._error is not None) and self._size <= limit:
            self._resume()
            await self._news()
        if self._size > limit:
            raise EngineProtocolError(f"The engine's answer is larger than engine.max_reply_bytes ({limit}).")
        return self._take()

    def drain(self) -> None:
        """Nobody wants the rest of the reply; its end makes the connection usable."""
        self._draining = True
        self._parts, self._size = [], 0
        self._resume()

    def release(self, now: float) -> None:
        """The request is over, and the connection is usable."""
        self._busy = self._draining = self._headed = self._whole = self._framed = False
        self._head_bytes = self._size = self._wanted = self.status = 0
        self._parts, self.content_type = [], ""
        self._resume()
        self._deadline = math.inf
        self.idle_since = now

    @property
    def whole(self) -> bool:
        """The reply has come to its end."""
        return self._whole

    def fail(self, error: TurnstileError) -> None:
        """Ends the request with ``error``, and closes the connection."""
        self._error = self._error or error
        self._parts, self._size = [], 0
        self._wake()
        self.close()

    def close(self) -> None:
        """Closes at once, whatever is unsent or unread: the server sees that we are gone."""
        if self._transport is not None:
            self._transport.abort()

    # Waiting

    async def _news(self) -> None:
        """Returns at the next news of the reply. Raises the error that ended it."""
        if self._error is not None:
            raise self._error
        if self._lost and not self._whole:
            raise broken("it was closed")
        self._waiter = self._loop.create_future()
        self._arm()
        try:
            await self._waiter
        finally:
            self._waiter = None
        if self._error is not None and not self._parts:
            raise self._error

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _arm(self) -> None:
        """Sets the timer where it would come too late. One that comes too early is set again when it comes, so
        that a deadline that moves on with every chunk costs an assignment."""
        due = self._deadline
        if due == math.inf or (self._timer is not None and self._timer.when() <= due):
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_at(due, self._timed_out)

    def _timed_out(self) -> None:
        self._timer = None
        if self._waiter is None or self._waiter.done():
            return  # nobody waits; the next wait sets it again
        if self._loop.time() < self._deadline:
            self._arm()
            return
        self.fail(EngineTimeout(f"The engine sent nothing for {self.limit_s:g} s; the call was given up."))

    def _take(self) -> bytes:
        parts = self._parts
        data = parts[0] if len(parts) == 1 else b"".join(parts)
        self._parts, self._size = [], 0
        self._resume()
        return data

    def _resume(self) -> None:
        if self._paused and self._transport is not None:
            self._paused = False
            if not self._lost and not self._transport.is_closing():
                self._transport.resume_reading()

    def _break(self, what: str) -> None:
        if self._error is None:
            self._error = broken(what)
        self._wake()
        self.close()


def broken(what: str) -> EngineUnavailable:
    return EngineUnavailable(f"The connection to the engine broke: {what}")
