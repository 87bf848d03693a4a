"""The OpenEnv routes of a server without a model.

Such a server describes itself as any other does, so that ``openenv validate --url`` passes: name, schemas, routes,
JSON-RPC. What needs a model is refused with the reason, in the form of its protocol.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response
from starlette.websockets import WebSocket, WebSocketDisconnect

from turnstile_server.control.body import json_bytes, json_response, parse_json
from turnstile_server.control.openenv.openenv_wire import JsonRpcErrorCode, rpc_error
from turnstile_server.control.openenv.routes import add_description_routes, ws_refusal
from turnstile_server.errors import EngineUnavailable


def build_standby_router(reason: str, *, production: bool = False) -> APIRouter:
    """The routes of ``build_openenv_router``; those that need a model answer 503 with ``reason``."""
    router = APIRouter()
    missing = EngineUnavailable(reason)

    add_description_routes(router)

    @router.post("/mcp")
    async def mcp(request: Request) -> Response:
        return json_response(rpc_answer(await request.body()))

    def rpc_answer(text: str | bytes) -> dict[str, Any]:
        try:
            message = parse_json(text)
        except ValueError as error:
            return rpc_error(JsonRpcErrorCode.PARSE_ERROR, f"not JSON: {error}")
        if not isinstance(message, dict) or message.get("jsonrpc") != "2.0":
            return rpc_error(JsonRpcErrorCode.INVALID_REQUEST, "not a JSON-RPC request")
        return rpc_error(JsonRpcErrorCode.SERVER_ERROR, missing.message, message.get("id"), {"type": missing.type})

    async def refused() -> Response:
        raise missing

    if not production:
        for method, path in (("POST", "/reset"), ("POST", "/step"), ("GET", "/state")):
            router.add_api_route(path, refused, methods=[method])

    @router.websocket("/ws")
    async def ws(websocket: WebSocket) -> None:
        await _answer_all(websocket, lambda _: ws_refusal(missing))

    @router.websocket("/mcp")
    async def mcp_socket(websocket: WebSocket) -> None:
        await _answer_all(websocket, lambda text: json_bytes(rpc_answer(text)).decode())

    return router


async def _answer_all(websocket: WebSocket, answer: Callable[[str], str]) -> None:
    """Answer every text until the client leaves; its bytes are ignored. A socket that was closed at once would
    hide the reason: the published clients send before they read."""
    await websocket.accept()
    while (message := await websocket.receive())["type"] != "websocket.disconnect":
        if message.get("text") is None:
            continue
        try:
            await websocket.send_text(answer(message["text"]))
        except WebSocketDisconnect:
            return
