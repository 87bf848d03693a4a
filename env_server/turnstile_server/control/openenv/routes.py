"""The OpenEnv routes: HTTP in and out, nothing of the framework. ``OpenEnvServer`` does the work.

Request and reply shapes are those of openenv-core 0.3.0's own server; errors have the control API's shape.
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
from turnstile_server.control.openenv.loader import OpenEnvLoader
from turnstile_server.control.openenv.parts import metadata
from turnstile_server.errors import InvalidRequest, NotInstalled

PARSE_ERROR = -32700
"""JSON-RPC 2.0, section 5.1."""

INTERNAL_ERROR = 1011
"""Close code (RFC 6455, section 7.4.1)."""


def build_openenv_router(loader: OpenEnvLoader) -> APIRouter:
    """``/ws``, ``/reset``, ``/step``, ``/state``, ``/schema``, ``/metadata`` and ``/mcp``."""
    router = APIRouter()
    _add_description_routes(router, loader)
    _add_simulation_routes(router, loader)
    _add_mcp_route(router, loader)

    @router.websocket("/ws")
    async def ws(websocket: WebSocket) -> None:
        try:
            await websocket.accept()
            await _serve(websocket)
        except WebSocketDisconnect:
            return  # the client left before anything was started

    async def _serve(websocket: WebSocket) -> None:
        try:
            server = await loader.server()
        except NotInstalled as error:
            data = {"message": error.message, "code": "SESSION_ERROR", "type": error.type}
            await websocket.send_text(json_bytes({"type": "error", "data": data}).decode())
            await websocket.close(INTERNAL_ERROR)
            return
        await server.socket(websocket)

    return router


def _add_description_routes(router: APIRouter, loader: OpenEnvLoader) -> None:
    @router.get("/metadata")
    async def get_metadata() -> Response:
        return json_response(metadata())

    @router.get("/schema")
    async def get_schema() -> Response:
        return json_response((await loader.server()).schema())


def _add_simulation_routes(router: APIRouter, loader: OpenEnvLoader) -> None:
    @router.post("/reset")
    async def reset(request: Request) -> Response:
        parameters = await _object(request)
        server = await loader.server()
        return await _answer(request, lambda: server.reset(parameters))

    @router.post("/step")
    async def step(request: Request) -> Response:
        raw = await _object(request)
        server = await loader.server()
        try:
            wanted = server.step_request.model_validate(raw)
        except ValidationError as error:
            raise unprocessable(error.errors()) from error
        return await _answer(request, lambda: server.step(wanted))

    @router.get("/state")
    async def state(episode_id: str | None = None) -> Response:
        return json_response(await (await loader.server()).state(episode_id))


def _add_mcp_route(router: APIRouter, loader: OpenEnvLoader) -> None:
    @router.post("/mcp")
    async def mcp(request: Request, episode_id: str | None = None) -> Response:
        raw = await request.body()
        server = await loader.server()
        try:
            message = parse_json(raw)
        except ValueError as error:
            fault = {"code": PARSE_ERROR, "message": f"not JSON: {error}"}
            return json_response({"jsonrpc": "2.0", "id": None, "error": fault})
        return await _answer(request, lambda: server.rpc(message, episode_id))


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
