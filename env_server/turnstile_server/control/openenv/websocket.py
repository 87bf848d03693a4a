"""``/ws``: frames of one WebSocket, answered in order in one environment.

Client: ``{"type": "reset"|"step"|"mcp", "data": {…}}``, ``{"type": "state"|"close"}``. Server:
``{"type": "observation"|"state"|"mcp", "data": {…}}``, ``{"type": "error", "data": {"message", "code", …}}``, as
openenv-core 0.3.0 writes them.

One task reads and one answers, so that a client that closes or disappears is noticed while a step runs. What must
hold: then the running step is cancelled, and so is the episode that the socket owns; at shutdown the socket closes
at once, and the episode is left as it is.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import anyio
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream
from openenv.core.env_server.mcp_types import WSMCPMessage, WSMCPResponse
from openenv.core.env_server.types import (
    WSCloseMessage,
    WSErrorCode,
    WSErrorResponse,
    WSObservationResponse,
    WSResetMessage,
    WSStateMessage,
    WSStateResponse,
    WSStepMessage,
)
from pydantic import ValidationError
from starlette.websockets import WebSocket, WebSocketDisconnect, WebSocketState

from turnstile_server.control.body import parse_json
from turnstile_server.control.openenv.environment import TurnstileEnvironment
from turnstile_server.control.openenv.jsonrpc import JsonRpc
from turnstile_server.control.openenv.wire import TurnstileAction, serialise
from turnstile_server.errors import InvalidRequest, QueueFull, TurnstileError, Unprocessable

_LOG = logging.getLogger(__name__)
_FAILED = "the server failed on this message; its log says why"

NORMAL, GOING_AWAY, UNSUPPORTED, POLICY = 1000, 1001, 1003, 1008
"""Close codes (RFC 6455, section 7.4.1)."""


SocketFrame = WSResetMessage | WSStepMessage | WSStateMessage | WSCloseMessage | WSMCPMessage

_FRAMES: dict[str, type[SocketFrame]] = {
    "reset": WSResetMessage,
    "step": WSStepMessage,
    "state": WSStateMessage,
    "close": WSCloseMessage,
    "mcp": WSMCPMessage,
}


@dataclass(frozen=True, slots=True)
class SocketLimits:
    """``max_chars`` of one frame, ``max_ahead`` unanswered frames, seconds for the client to take a frame."""

    max_chars: int
    max_ahead: int
    send_timeout_s: float


class OpenEnvSocket:
    """``started`` is called with each environment whose episode was started detached."""

    def __init__(
        self,
        websocket: WebSocket,
        environment: TurnstileEnvironment,
        rpc: JsonRpc,
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
        """Serve an accepted socket to its end."""
        into, frames = anyio.create_memory_object_stream[SocketFrame | str](self._limits.max_ahead)
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

    async def _read(self, into: MemoryObjectSendStream[SocketFrame | str], serving: anyio.CancelScope) -> None:
        with into:
            self._code = await self._read_all(into)
            serving.cancel()

    async def _read_all(self, into: MemoryObjectSendStream[SocketFrame | str]) -> int:
        """Read frames until the socket is to be closed; returns the close code."""
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

    async def _answer_all(self, frames: MemoryObjectReceiveStream[SocketFrame | str]) -> None:
        async for frame in frames:
            text = frame if isinstance(frame, str) else await self._answer(frame)
            with anyio.move_on_after(self._limits.send_timeout_s) as sending:
                try:
                    await self._websocket.send_text(text)
                except WebSocketDisconnect:
                    return
            if sending.cancelled_caught:
                return

    async def _answer(self, frame: SocketFrame) -> str:
        try:
            return await self._answered(frame)
        except ValidationError as error:
            return invalid_frame(error)
        except TurnstileError as error:
            return refusal_frame(error)
        except Exception:  # noqa: BLE001 - the boundary: the trainer gets an answer whatever failed
            _LOG.exception("a message on /ws failed")
            return error_frame(_FAILED, WSErrorCode.EXECUTION_ERROR, type=TurnstileError.type)

    async def _answered(self, frame: SocketFrame) -> str:
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
                return  # the client closed it first


def read_frame(text: str, max_chars: int) -> SocketFrame | str:
    """The parsed frame, or the error frame to answer with."""
    if len(text) > max_chars:
        return error_frame(
            f"the frame is larger than {max_chars} characters (control.max_body_bytes)",
            WSErrorCode.VALIDATION_ERROR,
        )
    try:
        raw = parse_json(text)
    except ValueError as error:
        return error_frame(f"Invalid JSON: {error}", WSErrorCode.INVALID_JSON)
    kind = raw.get("type") if isinstance(raw, dict) else None
    known = _FRAMES.get(kind) if isinstance(kind, str) else None
    if known is None:
        return error_frame(f"Unknown message type: {kind!r}", WSErrorCode.UNKNOWN_TYPE)
    try:
        return known.model_validate(raw)
    except ValidationError as error:
        return invalid_frame(error)


def error_frame(message: str, code: WSErrorCode, **more: Any) -> str:
    return WSErrorResponse(data={"message": message, "code": code, **more}).model_dump_json()


def invalid_frame(error: ValidationError) -> str:
    """Name the invalid fields, without repeating their values."""
    found = error.errors(include_url=False, include_context=False, include_input=False)
    said = "; ".join(f"{'.'.join(map(str, item['loc'])) or 'message'}: {item['msg']}" for item in found)
    return error_frame(f"Invalid message: {said}", WSErrorCode.VALIDATION_ERROR, errors=found)


def refusal_frame(error: TurnstileError) -> str:
    """An error of the server, with its own type beside the framework's code, which clients print."""
    match error:
        case QueueFull():
            code = WSErrorCode.CAPACITY_REACHED
        case InvalidRequest() | Unprocessable():
            code = WSErrorCode.VALIDATION_ERROR
        case _:
            code = WSErrorCode.EXECUTION_ERROR
    more: dict[str, Any] = {"type": error.type}
    if error.detail is not None:
        more["detail"] = error.detail
    if error.retry_after_s is not None:
        more["retry_after_s"] = error.retry_after_s
    return error_frame(error.message, code, **more)
