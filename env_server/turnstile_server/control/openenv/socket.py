"""One WebSocket: frames answered in their order, one environment, let go when the peer goes.

Two tasks: one reads, so that a peer that closes or disappears is noticed while a step runs; one answers. Holds:
when the peer goes or says ``close``, the running step is cancelled and so is the owned episode; at shutdown the
socket closes at once and the episode is left to its owner.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import anyio
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream
from openenv.core.env_server.mcp_types import WSMCPMessage, WSMCPResponse
from openenv.core.env_server.types import (
    WSCloseMessage,
    WSErrorCode,
    WSObservationResponse,
    WSResetMessage,
    WSStateResponse,
    WSStepMessage,
)
from pydantic import ValidationError
from starlette.websockets import WebSocket, WebSocketDisconnect, WebSocketState

from turnstile_server.control.openenv.environment import TurnstileEnvironment
from turnstile_server.control.openenv.frames import Frame, error_frame, invalid_frame, read_frame, refusal_frame
from turnstile_server.control.openenv.jsonrpc import Rpc
from turnstile_server.control.openenv.wire import TurnstileAction, serialise
from turnstile_server.errors import TurnstileError

_LOG = logging.getLogger(__name__)
_FAILED = "the server failed on this message; its log says why"

NORMAL, GOING_AWAY, UNSUPPORTED, POLICY = 1000, 1001, 1003, 1008
"""Close codes (RFC 6455, section 7.4.1)."""


@dataclass(frozen=True, slots=True)
class SocketLimits:
    max_chars: int
    max_ahead: int
    send_timeout_s: float


class Socket:
    """``started`` is told of each environment whose episode was started detached."""

    def __init__(
        self,
        websocket: WebSocket,
        environment: TurnstileEnvironment,
        rpc: Rpc,
        limits: SocketLimits,
        closing: anyio.Event,
        started: Callable[[TurnstileEnvironment], Awaitable[None]],
    ) -> None:
        self._websocket = websocket
        self._environment = environment
        self._rpc = rpc
        self._limits = limits
        self._closing = closing
        self._started = started
        self._code = NORMAL

    async def serve(self) -> None:
        """Serves an accepted socket to its end."""
        into, frames = anyio.create_memory_object_stream[Frame | str](self._limits.max_ahead)
        try:
            async with anyio.create_task_group() as tasks, frames:
                tasks.start_soon(self._read, into, tasks.cancel_scope)
                tasks.start_soon(self._until_closing, tasks.cancel_scope)
                await self._answer_all(frames)
                tasks.cancel_scope.cancel()
        finally:
            if not self._closing.is_set():
                await self._environment.release()
            await self._close()

    async def _read(self, into: MemoryObjectSendStream[Frame | str], serving: anyio.CancelScope) -> None:
        with into:
            self._code = await self._read_all(into)
            serving.cancel()

    async def _read_all(self, into: MemoryObjectSendStream[Frame | str]) -> int:
        """Reads to the end of what is to be answered; the code to close with."""
        while True:
            message = await self._websocket.receive()
            if message["type"] == "websocket.disconnect":
                return NORMAL
            text = message.get("text")
            if text is None:
                return UNSUPPORTED
            frame = read_frame(text, self._limits.max_chars)
            if isinstance(frame, WSCloseMessage):
                return NORMAL
            try:
                into.send_nowait(frame)
            except anyio.WouldBlock:
                return POLICY

    async def _until_closing(self, serving: anyio.CancelScope) -> None:
        await self._closing.wait()
        self._code = GOING_AWAY
        serving.cancel()

    async def _answer_all(self, frames: MemoryObjectReceiveStream[Frame | str]) -> None:
        async for frame in frames:
            text = frame if isinstance(frame, str) else await self._answer(frame)
            with anyio.move_on_after(self._limits.send_timeout_s) as sending:
                try:
                    await self._websocket.send_text(text)
                except WebSocketDisconnect:
                    return
            if sending.cancelled_caught:
                return

    async def _answer(self, frame: Frame) -> str:
        try:
            return await self._answered(frame)
        except ValidationError as error:
            return invalid_frame(error)
        except TurnstileError as error:
            return refusal_frame(error)
        except Exception:  # noqa: BLE001 - the boundary: a trainer gets an answer whatever we broke
            _LOG.exception("a message on /ws failed")
            return error_frame(_FAILED, WSErrorCode.EXECUTION_ERROR, type=TurnstileError.type)

    async def _answered(self, frame: Frame) -> str:
        environment = self._environment
        match frame:
            case WSResetMessage():
                observation = await environment.reset_async(**frame.data)
                if not environment.owned:
                    await self._started(environment)
                return WSObservationResponse(data=serialise(observation)).model_dump_json()
            case WSStepMessage():
                observation = await environment.step_async(TurnstileAction.model_validate(frame.data))
                return WSObservationResponse(data=serialise(observation)).model_dump_json()
            case WSMCPMessage():
                answer = await self._rpc.answer(frame.data, environment)
                return WSMCPResponse(data=answer or {}).model_dump_json()
            case _:
                return WSStateResponse(data=(await environment.refreshed()).model_dump()).model_dump_json()

    async def _close(self) -> None:
        if self._websocket.application_state is not WebSocketState.CONNECTED:
            return
        with anyio.move_on_after(self._limits.send_timeout_s, shield=True):
            try:
                await self._websocket.close(self._code)
            except (RuntimeError, WebSocketDisconnect):
                return  # the peer was faster
