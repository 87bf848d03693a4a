"""One WebSocket: messages read ahead, answered in order, and the episode that goes when its client goes.

One task reads and one answers, so that a client that closes or disappears is noticed while a call runs. What must
hold: then the running call is cancelled, and so is the episode that the socket owns; at shutdown the socket closes
at once, and the episode is left as it is.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import anyio
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream
from starlette.websockets import WebSocket, WebSocketDisconnect, WebSocketState

from turnstile_server.control.body import too_many_values
from turnstile_server.http.json_values import count_values, has_few_values

NORMAL, GOING_AWAY, UNSUPPORTED, POLICY = 1000, 1001, 1003, 1008
"""Close codes (RFC 6455, section 7.4.1)."""


MessageT = TypeVar("MessageT")


@dataclass(frozen=True, slots=True)
class SocketLimits:
    """``max_chars`` and ``max_values`` of one message, ``max_ahead`` unanswered messages, seconds to take an
    answer."""

    max_chars: int
    max_values: int
    max_ahead: int
    send_timeout_s: float

    def refusal(self, text: str) -> str | None:
        """Error text for a message that is too long or has too many values; None where it is neither."""
        if len(text) > self.max_chars:
            return f"the message is larger than {self.max_chars} characters (control.max_body_bytes)"
        data = text.encode("utf-8", "surrogatepass")
        if has_few_values(data, self.max_values) or count_values(data, self.max_values) <= self.max_values:
            return None
        return too_many_values(self.max_values)


class SocketProtocol(Protocol[MessageT]):
    """The messages and answers of one kind of socket. No method raises."""

    def parse(self, text: str) -> MessageT | None:
        """One message; None closes the socket at once."""
        ...

    async def answer(self, message: MessageT) -> str | None:
        """The answer to a message; None where it has none. Cancelled when the client goes."""
        ...

    def full(self, message: str, sockets: int, most: int) -> str:
        """The answer on a socket beyond the bound."""
        ...


class BoundedSocket(Generic[MessageT]):
    """Serves an accepted socket. ``release`` gives up what the socket owns; it is not called at shutdown
    (``closing``)."""

    def __init__(
        self,
        websocket: WebSocket,
        protocol: SocketProtocol[MessageT],
        limits: SocketLimits,
        closing: anyio.Event,
        release: Callable[[], Awaitable[None]],
    ) -> None:
        self._websocket = websocket
        self._limits = limits
        self._closing = closing
        self._protocol = protocol
        self._release = release
        self._code = NORMAL

    async def serve(self) -> None:
        """Serve the socket to its end."""
        into, messages = anyio.create_memory_object_stream[MessageT](self._limits.max_ahead)
        try:
            async with anyio.create_task_group() as tasks, messages:
                tasks.start_soon(self._read, into, tasks.cancel_scope)
                tasks.start_soon(self._until_closing, tasks.cancel_scope)
                await self._answer_all(messages)
                tasks.cancel_scope.cancel()
        finally:
            if not self._closing.is_set():
                await self._release()
            await self._close()

    async def _read(self, into: MemoryObjectSendStream[MessageT], serving: anyio.CancelScope) -> None:
        with into:
            self._code = await self._read_all(into)
            serving.cancel()

    async def _read_all(self, into: MemoryObjectSendStream[MessageT]) -> int:
        """Read messages until the socket is to be closed; returns the close code."""
        while True:
            message = await self._websocket.receive()
            if message["type"] == "websocket.disconnect":
                return NORMAL
            text = message.get("text")
            if text is None:
                return UNSUPPORTED
            parsed = self._protocol.parse(text)
            if parsed is None:
                return NORMAL
            try:
                into.send_nowait(parsed)
            except anyio.WouldBlock:
                return POLICY

    async def _until_closing(self, serving: anyio.CancelScope) -> None:
        await self._closing.wait()
        self._code = GOING_AWAY
        serving.cancel()

    async def _answer_all(self, messages: MemoryObjectReceiveStream[MessageT]) -> None:
        async for message in messages:
            text = await self._protocol.answer(message)
            if text is None:
                continue
            with anyio.move_on_after(self._limits.send_timeout_s) as sending:
                try:
                    await self._websocket.send_text(text)
                except WebSocketDisconnect:
                    return
            if sending.cancelled_caught:
                return

    async def _close(self) -> None:
        if self._websocket.application_state is not WebSocketState.CONNECTED:
            return
        with anyio.move_on_after(self._limits.send_timeout_s, shield=True):
            try:
                await self._websocket.close(self._code)
            except (RuntimeError, WebSocketDisconnect):
                return  # the client closed it first
