"""The OpenEnv routes: HTTP in and out, nothing of the framework. ``OpenEnvServer`` does the work.

Request and reply shapes are those of OpenEnv's own server; errors have the control API's shape. In
production mode (``openenv.mode``) ``/reset``, ``/step`` and ``/state`` are no routes, and ``/ws`` refuses their
frames. A server without a model has the routes of ``standby``.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import APIRouter, Request
from pydantic import ValidationError
from starlette.responses import Response
from starlette.websockets import WebSocket, WebSocketDisconnect

from turnstile_server.control.body import (
    json_bytes,
    json_response,
    parse_json,
    read_json,
    while_connected,
)
from turnstile_server.control.errors import unprocessable
from turnstile_server.control.openenv.openenv_parts import metadata
from turnstile_server.control.openenv.openenv_types import schemas
from turnstile_server.control.openenv.openenv_wire import JsonRpcErrorCode, WSErrorCode, rpc_error
from turnstile_server.control.openenv.server import OpenEnvServer, StepRequest
from turnstile_server.errors import Conflict, InvalidRequest, NotFound, TurnstileError

POLICY = 1008
"""Close code (RFC 6455, section 7.4.1)."""

SESSION_HEADER = "mcp-session-id"


def build_openenv_router(server: OpenEnvServer, *, production: bool = False) -> APIRouter:
    """``/ws``, ``/schema``, ``/metadata``, ``/mcp``; unless ``production``, ``/reset``, ``/step``, ``/state``."""
    router = APIRouter()
    add_description_routes(router)
    if not production:
        _add_simulation_routes(router, server)
    _add_mcp_routes(router, server)
    _add_sockets(router, server)
    return router


def descriptions() -> dict[str, Any]:
    """What describes the environment, by path. It needs no model."""
    return {"/metadata": metadata(), "/schema": schemas()}


def add_description_routes(router: APIRouter) -> None:
    for path, described in descriptions().items():
        router.add_api_route(path, _answers(described))


def _answers(described: Any) -> Callable[[], Awaitable[Response]]:
    async def get_description() -> Response:
        return json_response(described)

    return get_description


def _add_simulation_routes(router: APIRouter, server: OpenEnvServer) -> None:
    @router.post("/reset")
    async def reset(request: Request) -> Response:
        parameters = await _object(request)
        return await _answer(request, lambda: server.reset(parameters, request.scope))

    @router.post("/step")
    async def step(request: Request) -> Response:
        raw = await _object(request)
        try:
            wanted = StepRequest.model_validate(raw)
        except ValidationError as error:
            raise unprocessable(error.errors()) from error
        return await _answer(request, lambda: server.step(wanted))

    @router.get("/state")
    async def state(episode_id: str | None = None) -> Response:
        return json_response(await server.state(episode_id))


def _add_mcp_routes(router: APIRouter, server: OpenEnvServer) -> None:
    @router.post("/mcp")
    async def mcp(request: Request, episode_id: str | None = None) -> Response:
        raw = await request.body()
        session_id = request.headers.get(SESSION_HEADER)
        try:
            message = parse_json(raw)
        except ValueError as error:
            return json_response(rpc_error(JsonRpcErrorCode.PARSE_ERROR, f"not JSON: {error}"))
        headers: dict[str, str] = {}

        async def answered() -> dict[str, Any] | None:
            answer = await server.rpc(message, episode_id, session_id, request.scope)
            if answer.session_id is not None:
                headers[SESSION_HEADER] = answer.session_id
            return answer.body

        response = await _answer(request, answered)
        response.headers.update(headers)
        return response

    @router.delete("/mcp", status_code=204)
    async def close(request: Request) -> Response:
        """The end of a session of MCP's streamable HTTP."""
        session_id = request.headers.get(SESSION_HEADER)
        if session_id is None:
            raise InvalidRequest("DELETE /mcp ends a session, which the header Mcp-Session-Id names")
        await server.close_session(session_id)
        return Response(status_code=204)


def _add_sockets(router: APIRouter, server: OpenEnvServer) -> None:
    @router.websocket("/ws")
    async def ws(websocket: WebSocket) -> None:
        await _serve_socket(websocket, lambda: _serve_ws(websocket), ws_refusal)

    @router.websocket("/mcp")
    async def mcp_socket(websocket: WebSocket) -> None:
        await _serve_socket(websocket, lambda: _serve_mcp(websocket), rpc_refusal)

    async def _serve_ws(websocket: WebSocket) -> None:
        await server.ws(websocket)

    async def _serve_mcp(websocket: WebSocket) -> None:
        await server.mcp_socket(websocket)


async def _serve_socket(
    websocket: WebSocket, serve: Callable[[], Awaitable[None]], refusal: Callable[[TurnstileError], str]
) -> None:
    """Accept a socket and serve it. An error before it is served is told in its protocol, and closes it."""
    try:
        await websocket.accept()
        try:
            await serve()
        except (NotFound, Conflict) as error:  # of the session that the address names
            await websocket.send_text(refusal(error))
            await websocket.close(POLICY)
    except WebSocketDisconnect:
        return  # the client left before anything was started


def ws_refusal(error: TurnstileError) -> str:
    """The error as a frame of ``/ws``."""
    data = {"message": error.message, "code": WSErrorCode.SESSION_ERROR, "type": error.type}
    return json_bytes({"type": "error", "data": data}).decode()


def rpc_refusal(error: TurnstileError) -> str:
    """The error as a JSON-RPC error that answers no particular request."""
    return json_bytes(rpc_error(JsonRpcErrorCode.SERVER_ERROR, error.message, data={"type": error.type})).decode()


async def _object(request: Request) -> dict[str, Any]:
    value = await read_json(request)
    if not isinstance(value, dict):
        raise InvalidRequest("The body must be a JSON object.")
    return value


async def _answer(request: Request, work: Callable[[], Awaitable[dict[str, Any] | None]]) -> Response:
    """The result of ``work`` as JSON, 202 where it has none. A caller that hangs up cancels it."""
    try:
        result = await while_connected(request, work)
    except ValidationError as error:
        raise unprocessable(error.errors()) from error
    return json_response(result) if result is not None else Response(status_code=202)
