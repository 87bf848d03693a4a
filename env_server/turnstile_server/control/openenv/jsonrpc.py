"""``/mcp`` of the control API: OpenEnv's JSON-RPC, with enough of MCP for a standard client to play.

``tools/list`` and ``tools/call`` act in one episode: the one that the parameters name (``session_id`` or
``episode_id``), else that of the address (``?episode_id=``), else that of the session (a WebSocket, or what
``initialize`` opened), which begins one as ``reset`` without parameters does. ``openenv/session/create`` takes
what ``reset`` takes; over HTTP its episode is detached, and its id is the session's. Without parameters the
episode begins with the first call, or with ``reset`` on ``/ws?session_id=…``, which plays in the session.
Agents have a standard MCP server of their own, the MCP endpoint. JSON-RPC: https://www.jsonrpc.org/specification

A tool that failed is a result with ``isError``. A call that could not be made (an unknown tool, an ended episode,
a lost sandbox) is a JSON-RPC error, because OpenEnv's tool client takes any result for a success.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from turnstile.models.faults import fault_text
from turnstile_server.control.body import json_bytes, parse_json
from turnstile_server.control.openenv.environment import TurnstileEnvironment
from turnstile_server.control.openenv.openenv_parts import metadata
from turnstile_server.control.openenv.openenv_wire import JsonRpcErrorCode, ToolErrorType, rpc_error, rpc_result
from turnstile_server.control.openenv.socket import SocketLimits, SocketProtocol
from turnstile_server.control.openenv.tool_wire import mcp_result, mcp_tool
from turnstile_server.errors import NotFound, QueueFull, TurnstileError, Unprocessable

_LOG = logging.getLogger(__name__)

PROTOCOL_VERSIONS = ("2025-06-18", "2025-03-26", "2024-11-05")
"""Versions of MCP, newest first. The answers here are the same in each."""

_ABOUT = (
    "The trainer's endpoint. tools/call acts in the episode that ?episode_id= of this address or session_id in "
    "the parameters names, else in that of the session that initialize opened (the header Mcp-Session-Id). An "
    "agent's MCP server is its episode's tool_url."
)

Find = Callable[[str], Awaitable[TurnstileEnvironment]]
Create = Callable[[dict[str, Any]], Awaitable[str | None]]


class InvalidRpc(Exception):
    """A message that is not valid JSON-RPC or MCP, or names what there is not, with its JSON-RPC error code."""

    def __init__(self, code: JsonRpcErrorCode, message: str, data: Any = None) -> None:
        super().__init__(message)
        self.code = code
        self.data = data


@dataclass(frozen=True, slots=True)
class RpcSession:
    """Whose messages they are. ``create`` starts an episode with the parameters of ``reset`` and gives the
    session's id. ``begin`` starts one in ``environment``, if it has none; without it (a request over
    HTTP outside of a session), a call must name its episode. ``episode_id``: the one that the address names."""

    environment: TurnstileEnvironment
    create: Create
    begin: Callable[[], Awaitable[None]] | None = None
    episode_id: str | None = None


@dataclass(frozen=True, slots=True)
class RpcText:
    """A message of a socket. ``refusal`` answers a text that is none."""

    message: Any
    refusal: dict[str, Any] | None = None


class JsonRpc:
    """``find`` gives the environment that plays an episode."""

    def __init__(self, find: Find) -> None:
        self._find = find

    async def answer(self, message: Any, session: RpcSession) -> dict[str, Any] | None:
        """Answer one message; None for a notification."""
        request_id = message.get("id") if isinstance(message, dict) else None
        try:
            method, params = _checked(message)
            if method.startswith("notifications/"):
                return None
            result = await self._result(method, {"episode_id": session.episode_id, **params}, session)
        except InvalidRpc as error:
            return rpc_error(error.code, str(error), request_id, error.data)
        except ValidationError as error:
            found = error.errors(include_url=False, include_context=False, include_input=False)
            said = "; ".join(
                f"{'.'.join(map(str, item['loc'])) or 'params'}: {fault_text(item)}" for item in found
            )
            return rpc_error(JsonRpcErrorCode.INVALID_PARAMS, said, request_id)
        except TurnstileError as error:
            wrong = isinstance(error, NotFound | Unprocessable) and not isinstance(error, QueueFull)
            code = JsonRpcErrorCode.INVALID_PARAMS if wrong else JsonRpcErrorCode.SERVER_ERROR
            return rpc_error(code, error.message, request_id, {"type": error.type})
        except Exception:  # noqa: BLE001 - the boundary: JSON-RPC has an answer for this
            _LOG.exception("a message on /mcp failed")
            said = "the server failed; its log says why"
            return rpc_error(JsonRpcErrorCode.INTERNAL_ERROR, said, request_id)
        return rpc_result(result, request_id)

    async def _result(self, method: str, params: dict[str, Any], session: RpcSession) -> Any:
        match method:
            case "initialize":
                asked = params.get("protocolVersion")
                about = metadata()
                return {
                    "protocolVersion": asked if asked in PROTOCOL_VERSIONS else PROTOCOL_VERSIONS[0],
                    "capabilities": {"tools": {}},
                    "serverInfo": {"name": about["name"], "version": about["version"]},
                    "instructions": _ABOUT,
                }
            case "ping":
                return {}
            case "tools/list":
                listed = await self._playing(params, session)
                return {"tools": [mcp_tool(spec) for spec in listed.tools()]}
            case "tools/call":
                return await self._call(params, session)
            case "openenv/session/create":
                if session.environment.is_open:
                    return {"session_id": session.environment.episode_id}
                started = {name: value for name, value in params.items() if name != "episode_id" or value}
                return {"session_id": await session.create(started)}
            case "openenv/session/close":
                return await self._close(params, session)
        raise InvalidRpc(JsonRpcErrorCode.METHOD_NOT_FOUND, f"Method not found: {method}. {_ABOUT}")

    async def _close(self, params: dict[str, Any], session: RpcSession) -> dict[str, Any]:
        closed = await self._playing(params, session, begin=False)
        if closed.session is None:
            _with_episode(closed)
        named = params.get("session_id") or closed.episode_id
        if closed.session is not None:
            closed.session.closing = True
            if closed.session.attached:  # it ends when its socket does
                return {"session_id": named, "closed": False, "closing": True}
        if closed.episode_id is not None:
            await closed.close_session()
        return {"session_id": named, "closed": True}

    async def _call(self, params: dict[str, Any], session: RpcSession) -> dict[str, Any]:
        name, arguments = params.get("name"), params.get("arguments") or {}
        if not isinstance(name, str) or not name or not isinstance(arguments, dict):
            raise InvalidRpc(JsonRpcErrorCode.INVALID_PARAMS, "tools/call needs name, and arguments as an object")
        playing = _with_episode(await self._playing(params, session))
        answer = await playing.call_tool(name, arguments)
        if answer.error is not None:
            unknown = answer.error.error_type is ToolErrorType.TOOL_NOT_FOUND
            code = JsonRpcErrorCode.INVALID_PARAMS if unknown else JsonRpcErrorCode.SERVER_ERROR
            raise InvalidRpc(code, answer.error.message, {"error_type": answer.error.error_type.value})
        assert answer.result is not None
        return mcp_result(answer.result)

    async def _playing(
        self, params: dict[str, Any], session: RpcSession, *, begin: bool = True
    ) -> TurnstileEnvironment:
        named, environment = params.get("session_id") or params.get("episode_id"), session.environment
        if isinstance(named, str) and environment.episode_id != named:
            found = await self._find(named)
            if begin and found.session is not None:
                if found.session.closing:
                    raise NotFound(f"the session {named!r} was closed: openenv/session/create opens another")
                await found.begin()
            return found
        if begin and session.begin is not None:
            await session.begin()
        return environment


class RpcProtocol(SocketProtocol[RpcText]):
    """JSON-RPC over a socket: one message per frame."""

    def __init__(self, rpc: JsonRpc, session: RpcSession, limits: SocketLimits) -> None:
        self._rpc = rpc
        self._session = session
        self._limits = limits

    def parse(self, text: str) -> RpcText:
        too_long = self._limits.refusal(text)
        if too_long is not None:
            return RpcText(None, rpc_error(JsonRpcErrorCode.INVALID_REQUEST, too_long))
        try:
            return RpcText(parse_json(text))
        except ValueError as error:
            return RpcText(None, rpc_error(JsonRpcErrorCode.PARSE_ERROR, f"not JSON: {error}"))

    async def answer(self, text: RpcText) -> str | None:
        refusal = text.refusal
        answer = refusal if refusal is not None else await self._rpc.answer(text.message, self._session)
        return json_bytes(answer).decode() if answer is not None else None

    def full(self, message: str, sockets: int, most: int) -> str:
        data = {"active_sessions": sockets, "max_sessions": most}
        return json_bytes(rpc_error(JsonRpcErrorCode.SERVER_ERROR, message, data=data)).decode()


def _with_episode(environment: TurnstileEnvironment) -> TurnstileEnvironment:
    if environment.episode_id is None:
        raise InvalidRpc(JsonRpcErrorCode.INVALID_PARAMS, f"no episode is named. {_ABOUT}")
    return environment


def _checked(message: Any) -> tuple[str, dict[str, Any]]:
    if (
        not isinstance(message, dict)
        or message.get("jsonrpc") != "2.0"
        or not isinstance(message.get("method"), str)
    ):
        raise InvalidRpc(
            JsonRpcErrorCode.INVALID_REQUEST, 'not a JSON-RPC request: {"jsonrpc": "2.0", "method": …}'
        )
    params = message.get("params") or {}
    if not isinstance(params, dict):
        raise InvalidRpc(JsonRpcErrorCode.INVALID_PARAMS, "params must be an object")
    return message["method"], params
