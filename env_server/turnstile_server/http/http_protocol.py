"""uvicorn's HTTP/1.1 protocol with bounds: on request heads, on requests sent ahead, and on slow clients.

llhttp and uvicorn bound none of them. Holds: a head has at most ``max_head_bytes`` and ``max_headers``, and is
whole within ``head_timeout_s`` of its first byte (a new connection: of its opening); one request may wait behind
the one that is served, further ones are dropped and the connection is closed after the reply; what is refused here
is refused in the shape of ``refusal``, and logged by nobody.
"""

from __future__ import annotations

import asyncio
import sys
from functools import partial
from typing import Any, cast

from uvicorn._types import ASGIReceiveEvent
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from uvicorn.server import ServerState

from turnstile_server.http.body_parts import PartedFlow, PartedInput
from turnstile_server.http.connections import Seat, extensions_of
from turnstile_server.http.refusal import refusal
from turnstile_server.shortages import is_shortage

_INVALID = refusal(400, "invalid_request", "this is no valid request of HTTP 1.1", retry=False)
_SLOW = refusal(408, "request_timeout", "the head of this request did not arrive in time", retry=True)
_UPGRADE = refusal(
    400, "invalid_request", "a request with a body cannot ask for an upgrade: send it without Upgrade", retry=False
)
_NO_HANDSHAKE = refusal(
    400,
    "invalid_request",
    "this is no valid handshake of a WebSocket, or one of its lines is too long",
    retry=False,
)
_EXHAUSTED = refusal(503, "server_exhausted", "the server lacks memory for this request; try again", retry=True)
_TOO_LARGE = refusal(431, "head_too_large", "the headers of this request are too large or too many", retry=False)
_PART = 2048
"""Bytes that are parsed before the event loop may turn to others: 340 of the smallest chunks of a body, or of the
smallest frames of a WebSocket, which take milliseconds. What is left of a body whose length the head says is one
piece, however long: it is copied and not parsed."""
_AHEAD = 1
"""Requests that may wait behind the one being served."""


class SeatedWebSocket(WebSocketsSansIOProtocol):
    """uvicorn's WebSocket protocol on a connection that has a place.

    It is read in parts; and no further while the application has a message that it did not take, as uvicorn alone
    only stops the socket and not what it has read of it.
    """

    def __init__(self, seat: Seat, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._seat = seat
        self._input: PartedInput | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        feed = super().data_received
        self._input = PartedInput(transport, self._seat.parts, lambda: _PART, feed, self._takes_more)

    def data_received(self, data: bytes) -> None:
        if self._input is not None and self.handshake_initiated:
            self._input.received(data)
        else:  # the whole head
            super().data_received(data)
            if not self.handshake_initiated and not self.transport.is_closing():
                # uvicorn waits for more then, for ever, and sends nothing of what the library would say.
                self.transport.write(_NO_HANDSHAKE)
                self.transport.close()

    async def receive(self) -> ASGIReceiveEvent:
        message = await super().receive()
        if self._input is not None:
            self._input.go_on()
        return message

    def _takes_more(self) -> bool:
        return not self.read_paused

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if self._input is not None:
            self._input.close()
        self._seat.left()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._seat.took_bytes()


class BoundedHttp(HttpToolsProtocol):
    """One connection; ``seat`` is its place."""

    def __init__(self, seat: Seat, config: Config, server_state: ServerState) -> None:
        super().__init__(config, server_state, {})
        self._seat = seat
        if self.ws_protocol_class is not None:
            self.ws_protocol_class = cast(Any, partial(SeatedWebSocket, seat))
        self._head_bytes = 0
        self._headers_size = 0
        self._in_head = False
        self._in_body = False
        self._body_left = 0
        """Bytes of the body that are still to come; 0 where its length is not known."""
        self._fresh = True
        self._fault = _INVALID
        self._dropping = False
        self._served: RequestResponseCycle | None = None
        self._upgraded = False
        self._input: PartedInput | None = None

    # The connection

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._input = PartedInput(transport, self._seat.parts, self._part_size, self._feed, self._takes_more)
        self.flow = PartedFlow(transport, self._input)
        self._seat.opened(transport, self._too_slow)
        self._seat.request_ended()
        self._settle()

    def connection_lost(self, exc: Exception | None) -> None:
        if self.transport is not None:
            super().connection_lost(exc)
            self._unset_keepalive_if_required()
            self.pipeline.clear()
            if self._served is not None and not self._served.response_complete:
                # uvicorn tells the last request that came, which may still wait behind this one.
                self._served.disconnected = True
                self._served.message_event.set()
            self._served = None
            self.cycle = None  # type: ignore[assignment] # else both wait for the garbage collector
        if self._input is not None:
            self._input.close()
        self._seat.left()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._seat.blocked = True

    def resume_writing(self) -> None:
        super().resume_writing()
        self._seat.blocked = False
        self._seat.took_bytes()

    def _part_size(self) -> int:
        return max(_PART, self._body_left)

    def data_received(self, data: bytes) -> None:
        if self._input is not None and not self._dropping and not self.transport.is_closing():
            self._input.received(data)

    def _takes_more(self) -> bool:
        return not self.flow.read_paused

    def _feed(self, data: bytes) -> None:
        if self._dropping or self._upgraded:
            return
        self._head_bytes += len(data)
        super().data_received(data)
        if self._upgraded or self.transport.is_closing():
            return
        if self._head_bytes > self._seat.limits.max_head_bytes:
            self._refuse(_TOO_LARGE)
        else:
            self._settle()

    def send_400_response(self, msg: str) -> None:
        """uvicorn calls this while it handles the parser's error. One of our own calls may have been its cause."""
        error = sys.exc_info()[1]
        if error is not None and error.__context__ is not None and is_shortage(error.__context__):
            self._refuse(_EXHAUSTED)
        else:
            self._refuse(self._fault)

    def timeout_keep_alive_handler(self) -> None:
        """Does nothing: the seat closes idle connections. uvicorn's timer would also cut one whose next request
        came while this process stood still."""

    def handle_websocket_upgrade(self) -> None:
        self._seat.owe("nothing", None)
        self._seat.keep()
        self._upgraded = True
        super().handle_websocket_upgrade()

    def _settle(self) -> None:
        """Says what the client owes now."""
        seat, limits = self._seat, self._seat.limits
        serving = self.cycle is not None and not self.cycle.response_complete
        if serving:
            seat.owe("nothing", None)
        elif self._in_body:  # of a request that was answered before it was whole
            seat.owe("body", limits.body_stall_s)
        elif self._fresh or self._in_head or self._head_bytes:
            seat.owe("head", limits.head_timeout_s)
        else:
            seat.owe("idle", self.timeout_keep_alive)

    def _too_slow(self) -> None:
        if self._head_bytes and not self._in_body:
            self._refuse(_SLOW)
        else:
            self.transport.close()

    def _refuse(self, response: bytes) -> None:
        """Closes the connection; says why where no other response is under way."""
        self._dropping = True
        if self.cycle is None or self.cycle.response_complete:
            self.transport.write(response)
        self.transport.close()

    # Requests

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_head, self._headers_size = True, 0
        if not self._dropping:
            cast(dict[str, Any], self.scope)["extensions"] = extensions_of(self._seat)

    def on_url(self, url: bytes) -> None:
        self._headers_size += len(url)
        if self._headers_size > self._seat.limits.max_head_bytes:
            raise self._too_large()
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        limits = self._seat.limits
        self._headers_size += len(name) + len(value)
        if self._headers_size > limits.max_head_bytes:
            raise self._too_large()
        super().on_header(name, value)
        if len(self.headers) > limits.max_headers:
            raise self._too_large()

    def _too_large(self) -> ValueError:
        self._fault = _TOO_LARGE
        return ValueError("the head is too large")

    def on_headers_complete(self) -> None:
        self._head_bytes, self._in_head, self._in_body, self._fresh = 0, False, True, False
        self._body_left = self._announced_length()
        if self.parser.should_upgrade() and self._announces_body():
            # The parser takes such a body for what comes in the other protocol, and then for requests.
            self._fault = _UPGRADE
            raise ValueError("a body and another protocol")
        if len(self.pipeline) >= _AHEAD:
            self._dropping = True
            self.pipeline[0][0].keep_alive = False
        if self._dropping:
            return
        waits = self.cycle is not None and not self.cycle.response_complete
        super().on_headers_complete()
        if waits:
            # uvicorn stops reading here. But who hangs up must be noticed while the earlier request is served.
            self.flow.resume_reading()
        else:
            self._served = self.cycle
            self._seat.request_began()

    def _announced_length(self) -> int:
        """Bytes of the body, where its head says them and it comes as it is; the parser has checked the number."""
        length = 0
        for name, value in reversed(self.headers):
            if name == b"transfer-encoding":
                return 0
            if name == b"content-length":
                length = int(value)
        return length

    def _announces_body(self) -> bool:
        return any(
            name == b"transfer-encoding" or (name == b"content-length" and value.strip(b"0"))
            for name, value in self.headers
        )

    def on_body(self, body: bytes) -> None:
        self._head_bytes = 0
        self._body_left = max(0, self._body_left - len(body))
        if self._dropping:
            return
        cycle = self.cycle
        if isinstance(cycle.body, bytes):  # it was not taken yet: more is added to a buffer, as in uvicorn
            cycle.body = bytearray(cycle.body)
        if not cycle.body and len(body) >= _PART and not cycle.response_complete:
            # A large part is handed on as it is: a buffer would copy it when it comes and when it is taken.
            cycle.body = body  # type: ignore[assignment]
            body = b""
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._head_bytes, self._in_body, self._headers_size, self._body_left = 0, False, 0, 0
        if not self._dropping:
            super().on_message_complete()
            if not self.pipeline:
                self._seat.request_whole()

    def on_response_complete(self) -> None:
        self._served = self.pipeline[-1][0] if self.pipeline else None
        super().on_response_complete()
        if self.transport.is_closing():
            return
        if self._served is None:
            self._seat.request_ended()
        else:
            self._seat.request_began()
            if not self._served.more_body:
                self._seat.request_whole()
        self._settle()
