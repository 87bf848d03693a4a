"""``/mcp`` of the control API: OpenEnv's JSON-RPC, with enough of MCP for a standard client to get clear answers.

``tools/list`` and ``tools/call`` act in one episode. The parameters name it (``session_id`` or ``episode_id``), or
the address does (``?episode_id=``), or it is the episode of the WebSocket. ``openenv/session/create`` takes what
``reset`` takes and starts a detached episode, whose id is the session's; ``openenv/session/close`` cancels it.
Agents have a standard MCP server of their own, the MCP endpoint. JSON-RPC: https://www.jsonrpc.org/specification
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Any

from openenv.core.env_server.mcp_types import JsonRpcErrorCode, JsonRpcResponse, Tool
from pydantic import ValidationError

from turnstile_server.control.openenv.environment import TurnstileEnvironment
from turnstile_server.control.openenv.parts import metadata
from turnstile_server.control.openenv.wire import TurnstileAction
from turnstile_server.errors import NotFound, TurnstileError, Unprocessable

_LOG = logging.getLogger(__name__)

PROTOCOL_VERSIONS = ("2025-06-18", "2025-03-26", "2024-11-05")
"""Versions of MCP, newest first. The answers here are the same in each."""

_ABOUT = (
    "The trainer's endpoint. tools/call acts in the episode that ?episode_id= of this address or session_id "
    "in the parameters names. An agent's MCP server is its episode's tool_url."
)

Find = Callable[[str], Awaitable[TurnstileEnvironment]]
Create = Callable[[dict[str, Any]], Awaitable[TurnstileEnvironment]]


class InvalidRpc(Exception):
    """A message that is not valid JSON-RPC or MCP, with its JSON-RPC error code."""

    def __init__(self, code: JsonRpcErrorCode, message: str) -> None:
        super().__init__(message)
        self.code = code


class JsonRpc:
    """``find`` gives the environment that plays an episode, ``create`` one with a new, detached episode."""

    def __init__(self, find: Find, create: Create) -> None:
        self._find = find
        self._create = create

    async def answer(
        self, message: Any, environment: TurnstileEnvironment, *, episode_id: str | None = None
    ) -> dict[str, Any] | None:
        """Answer one message; None for a notification.

        ``environment`` is the connection's; over HTTP it has no episode. ``episode_id`` counts if the parameters
        name no episode.
        """
        request_id = message.get("id") if isinstance(message, dict) else None
        try:
            method, params = _checked(message)
            if method.startswith("notifications/"):
                return None
            result = await self._result(method, {"episode_id": episode_id, **params}, environment)
        except InvalidRpc as error:
            return _error(error.code, str(error), request_id)
        except ValidationError as error:
            found = error.errors(include_url=False, include_context=False, include_input=False)
            said = "; ".join(f"{'.'.join(map(str, item['loc'])) or 'params'}: {item['msg']}" for item in found)
            return _error(JsonRpcErrorCode.INVALID_PARAMS, said, request_id)
        except TurnstileError as error:
            wrong = isinstance(error, NotFound | Unprocessable)
            code = JsonRpcErrorCode.INVALID_PARAMS if wrong else JsonRpcErrorCode.SERVER_ERROR
            return _error(code, error.message, request_id, {"type": error.type})
        except Exception:  # noqa: BLE001 - the boundary: JSON-RPC has an answer for this
            _LOG.exception("a message on /mcp failed")
            return _error(JsonRpcErrorCode.INTERNAL_ERROR, "the server failed; its log says why", request_id)
        return JsonRpcResponse.success(result=result, request_id=request_id).model_dump()

    async def _result(self, method: str, params: dict[str, Any], environment: TurnstileEnvironment) -> Any:
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
                listed = await self._playing(params, environment)
                return {"tools": [_as_mcp(tool) for tool in listed.tools()]}
            case "tools/call":
                return await self._call(params, environment)
            case "openenv/session/create":
                if environment.episode_id is not None:
                    return {"session_id": environment.episode_id}
                started = {name: value for name, value in params.items() if name != "episode_id" or value}
                created = await self._create(started)
                return {"session_id": created.episode_id}
            case "openenv/session/close":
                closed = _with_episode(await self._playing(params, environment))
                await closed.cancel()
                return {"session_id": closed.episode_id, "closed": True}
        raise InvalidRpc(JsonRpcErrorCode.METHOD_NOT_FOUND, f"Method not found: {method}. {_ABOUT}")

    async def _call(self, params: dict[str, Any], environment: TurnstileEnvironment) -> dict[str, Any]:
        name, arguments = params.get("name"), params.get("arguments") or {}
        if not isinstance(name, str) or not name or not isinstance(arguments, dict):
            raise InvalidRpc(JsonRpcErrorCode.INVALID_PARAMS, "tools/call needs name, and arguments as an object")
        playing = _with_episode(await self._playing(params, environment))
        action = TurnstileAction(type="call_tool", tool_name=name, arguments=arguments)
        said = await playing.step_async(action)
        text = said.result if said.error is None else said.error.message
        shown = text if isinstance(text, str) else str(text)
        # `content` for MCP clients, `data` for OpenEnv's.
        return {"content": [{"type": "text", "text": shown}], "isError": said.error is not None, "data": text}

    async def _playing(self, params: dict[str, Any], environment: TurnstileEnvironment) -> TurnstileEnvironment:
        named = params.get("session_id") or params.get("episode_id")
        if isinstance(named, str) and environment.episode_id != named:
            return await self._find(named)
        return environment


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


def _error(code: JsonRpcErrorCode, message: str, request_id: Any, data: Any = None) -> dict[str, Any]:
    wellformed = request_id if isinstance(request_id, str | int) else None
    return JsonRpcResponse.error_response(code, message, data, wellformed).model_dump()


def _as_mcp(tool: Tool) -> dict[str, Any]:
    return {"name": tool.name, "description": tool.description, "inputSchema": tool.input_schema}
