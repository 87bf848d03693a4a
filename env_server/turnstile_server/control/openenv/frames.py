"""``/ws``: frames, and how each is answered.

Client: ``{"type": "reset"|"step"|"mcp", "data": {…}}``, ``{"type": "state"|"close"}``. Server:
``{"type": "observation"|"state"|"mcp", "data": {…}}``, ``{"type": "error", "data": {"message", "code", …}}``, as
OpenEnv writes them. In production mode there are ``mcp`` and ``close`` only.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Any

from pydantic import ValidationError

from turnstile.models.faults import fault_text
from turnstile_server.control.body import parse_json
from turnstile_server.control.openenv.environment import TurnstileEnvironment
from turnstile_server.control.openenv.jsonrpc import JsonRpc, RpcSession
from turnstile_server.control.openenv.openenv_parts import PRODUCTION
from turnstile_server.control.openenv.openenv_types import TurnstileAction, serialise
from turnstile_server.control.openenv.openenv_wire import (
    WSCloseMessage,
    WSErrorCode,
    WSErrorResponse,
    WSMCPMessage,
    WSMCPResponse,
    WSObservationResponse,
    WSResetMessage,
    WSStateMessage,
    WSStateResponse,
    WSStepMessage,
)
from turnstile_server.control.openenv.socket import SocketLimits, SocketProtocol
from turnstile_server.errors import InvalidRequest, QueueFull, TurnstileError, Unprocessable

_LOG = logging.getLogger(__name__)
_FAILED = "the server failed on this message; its log says why"

SocketFrame = WSResetMessage | WSStepMessage | WSStateMessage | WSMCPMessage

_FRAMES: dict[str, type[SocketFrame | WSCloseMessage]] = {
    "reset": WSResetMessage,
    "step": WSStepMessage,
    "state": WSStateMessage,
    "close": WSCloseMessage,
    "mcp": WSMCPMessage,
}
_OF_SIMULATION = frozenset({"reset", "step", "state"})


class FrameProtocol(SocketProtocol[SocketFrame | str]):
    """The frames of one ``/ws`` socket. ``started`` is called with the environment when its episode was started
    detached, or in a session that other requests can name."""

    def __init__(
        self,
        rpc: JsonRpc,
        session: RpcSession,
        limits: SocketLimits,
        started: Callable[[TurnstileEnvironment], Awaitable[None]],
        *,
        production: bool,
    ) -> None:
        self._rpc = rpc
        self._session = session
        self._environment = session.environment
        self._limits = limits
        self._started = started
        self._production = production

    def parse(self, text: str) -> SocketFrame | str | None:
        """The frame, or the error frame to answer with; None for ``close``."""
        return read_frame(text, self._limits, production=self._production)

    def full(self, message: str, sockets: int, most: int) -> str:
        return error_frame(message, WSErrorCode.CAPACITY_REACHED, active_sessions=sockets, max_sessions=most)

    async def answer(self, frame: SocketFrame | str) -> str:
        """The frame that answers ``frame``; a text is an answer already."""
        if isinstance(frame, str):
            return frame
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
                observation = await environment.reset(frame.data)
                if not environment.owned or environment.session is not None:
                    await self._started(environment)
                return WSObservationResponse(data=serialise(observation)).model_dump_json()
            case WSStepMessage():
                observation = await environment.step(TurnstileAction.model_validate(frame.data))
                return WSObservationResponse(data=serialise(observation)).model_dump_json()
            case WSMCPMessage():
                answer = await self._rpc.answer(frame.data, self._session)
                return WSMCPResponse(data=answer or {}).model_dump_json()
            case WSStateMessage():
                return WSStateResponse(data=(await environment.refreshed()).model_dump()).model_dump_json()


def read_frame(text: str, limits: SocketLimits, *, production: bool) -> SocketFrame | str | None:
    """The parsed frame, or the error frame to answer with; None for ``close``."""
    too_long = limits.refusal(text)
    if too_long is not None:
        return error_frame(too_long, WSErrorCode.VALIDATION_ERROR)
    try:
        raw = parse_json(text)
    except ValueError as error:
        return error_frame(f"Invalid JSON: {error}", WSErrorCode.INVALID_JSON)
    kind = raw.get("type") if isinstance(raw, dict) else None
    known = _FRAMES.get(kind) if isinstance(kind, str) else None
    if known is None:
        return error_frame(f"Unknown message type: {kind!r}", WSErrorCode.UNKNOWN_TYPE)
    if production and kind in _OF_SIMULATION:
        return error_frame(f"{kind}: {PRODUCTION}", WSErrorCode.UNKNOWN_TYPE)
    try:
        frame = known.model_validate(raw)
        return None if isinstance(frame, WSCloseMessage) else frame
    except ValidationError as error:
        return invalid_frame(error)


def error_frame(message: str, code: WSErrorCode, **more: Any) -> str:
    return WSErrorResponse(data={"message": message, "code": code, **more}).model_dump_json()


def invalid_frame(error: ValidationError) -> str:
    """Name the invalid fields, without repeating their values."""
    found = error.errors(include_url=False, include_context=False, include_input=False)
    said = "; ".join(f"{'.'.join(map(str, item['loc'])) or 'message'}: {fault_text(item)}" for item in found)
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
