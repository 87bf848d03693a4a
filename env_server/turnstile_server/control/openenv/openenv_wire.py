"""The types of OpenEnv's wire that this server speaks, as Pydantic models of our own.

They are those of ``openenv.core.env_server.types`` and ``mcp_types``, equal in ``openenv-core`` 0.3.0 and in
``openenv`` 0.10.0; ``tests/openenv/test_wire_types.py`` holds them equal to both. Neither is imported: both own
the folder ``openenv/``, the one ended in May 2026, and the other cannot be installed beside ``mcp`` 2.
"""

from __future__ import annotations

from enum import IntEnum, StrEnum
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field


class WSErrorCode(StrEnum):
    """``code`` of an error frame."""

    INVALID_JSON = "INVALID_JSON"
    UNKNOWN_TYPE = "UNKNOWN_TYPE"
    VALIDATION_ERROR = "VALIDATION_ERROR"
    EXECUTION_ERROR = "EXECUTION_ERROR"
    CAPACITY_REACHED = "CAPACITY_REACHED"
    FACTORY_ERROR = "FACTORY_ERROR"
    SESSION_ERROR = "SESSION_ERROR"


class JsonRpcErrorCode(IntEnum):
    """``code`` of a JSON-RPC error (https://www.jsonrpc.org/specification, section 5.1)."""

    PARSE_ERROR = -32700
    INVALID_REQUEST = -32600
    METHOD_NOT_FOUND = -32601
    INVALID_PARAMS = -32602
    INTERNAL_ERROR = -32603
    SERVER_ERROR = -32000


class ToolErrorType(StrEnum):
    """Why a tool could not be called."""

    EXECUTION_ERROR = "execution_error"
    INVALID_ARGS = "invalid_args"
    TRANSPORT_ERROR = "transport_error"
    TOOL_NOT_FOUND = "tool_not_found"
    TIMEOUT = "timeout"


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid")


class OpenEnvTool(_Strict):
    """A tool in an observation."""

    name: str
    description: str
    input_schema: dict[str, Any]


class OpenEnvToolError(_Strict):
    """A tool call that could not be made. What a tool itself says is its result, also when it failed."""

    error_type: ToolErrorType
    message: str


class OpenEnvAction(_Strict):
    """Base of what ``step`` takes."""

    metadata: dict[str, Any] = Field(default_factory=dict)


class OpenEnvObservation(_Strict):
    """Base of what ``reset`` and ``step`` give."""

    done: bool = False
    reward: bool | int | float | None = None
    metadata: dict[str, Any] = Field(default_factory=dict)


class OpenEnvState(BaseModel):
    """Base of what ``state`` gives."""

    model_config = ConfigDict(extra="allow")

    episode_id: str | None = None
    step_count: int = Field(0, ge=0)


class WSResetMessage(_Strict):
    """Frame of a client: begin an episode. ``data``: parameters of ``reset``."""

    type: Literal["reset"] = "reset"
    data: dict[str, Any] = Field(default_factory=dict)


class WSStepMessage(_Strict):
    """Frame of a client: run the action in ``data``."""

    type: Literal["step"] = "step"
    data: dict[str, Any]


class WSStateMessage(_Strict):
    """Frame of a client: tell the state."""

    type: Literal["state"] = "state"


class WSCloseMessage(_Strict):
    """Frame of a client: end the socket."""

    type: Literal["close"] = "close"


class WSMCPMessage(_Strict):
    """Frame of a client: a JSON-RPC request."""

    type: Literal["mcp"] = "mcp"
    data: dict[str, Any]


class WSObservationResponse(_Strict):
    """Answer to ``reset`` and ``step``."""

    type: Literal["observation"] = "observation"
    data: dict[str, Any]


class WSStateResponse(_Strict):
    """Answer to ``state``."""

    type: Literal["state"] = "state"
    data: dict[str, Any]


class WSErrorResponse(_Strict):
    """Answer to what could not be done: ``message``, ``code`` (WSErrorCode) and what else helps."""

    type: Literal["error"] = "error"
    data: dict[str, Any]


class WSMCPResponse(_Strict):
    """Answer to ``mcp``: a JSON-RPC response."""

    type: str = "mcp"
    data: dict[str, Any]


def rpc_result(result: Any, request_id: str | int | None) -> dict[str, Any]:
    """A JSON-RPC response."""
    return {"jsonrpc": "2.0", "id": request_id, "result": result}


def rpc_error(code: JsonRpcErrorCode, message: str, request_id: Any = None, data: Any = None) -> dict[str, Any]:
    """A JSON-RPC response that refuses. A ``request_id`` that is none of JSON-RPC's is left out."""
    wellformed = request_id if isinstance(request_id, str | int) else None
    error = {"code": int(code), "message": message, "data": data}
    return {"jsonrpc": "2.0", "id": wellformed, "error": error}
