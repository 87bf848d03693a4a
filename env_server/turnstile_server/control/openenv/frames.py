"""Frames of ``/ws``: text in, checked frames out, errors as the framework writes them (openenv-core 0.3.0).

Client: ``{"type": "reset"|"step"|"mcp", "data": {…}}``, ``{"type": "state"|"close"}``. Server:
``{"type": "observation"|"state"|"mcp", "data": {…}}``, ``{"type": "error", "data": {"message", "code", …}}``.
"""

from __future__ import annotations

from typing import Any

from openenv.core.env_server.mcp_types import WSMCPMessage
from openenv.core.env_server.types import (
    WSCloseMessage,
    WSErrorCode,
    WSErrorResponse,
    WSResetMessage,
    WSStateMessage,
    WSStepMessage,
)
from pydantic import ValidationError

from turnstile_server.control.body import parse_json
from turnstile_server.errors import InvalidRequest, QueueFull, TurnstileError, Unprocessable

Frame = WSResetMessage | WSStepMessage | WSStateMessage | WSCloseMessage | WSMCPMessage

_FRAMES: dict[str, type[Frame]] = {
    "reset": WSResetMessage,
    "step": WSStepMessage,
    "state": WSStateMessage,
    "close": WSCloseMessage,
    "mcp": WSMCPMessage,
}


def read_frame(text: str, max_chars: int) -> Frame | str:
    """The frame, or the error frame that answers it."""
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
    """Names the fields, and repeats nothing of what was sent."""
    found = error.errors(include_url=False, include_context=False, include_input=False)
    said = "; ".join(f"{'.'.join(map(str, item['loc'])) or 'message'}: {item['msg']}" for item in found)
    return error_frame(f"Invalid message: {said}", WSErrorCode.VALIDATION_ERROR, errors=found)


def refusal_frame(error: TurnstileError) -> str:
    """One of our errors; its own type beside the framework's code, which clients print."""
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
