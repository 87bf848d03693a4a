"""The OpenEnv routes of a server without a model.

Such a server describes itself as any other does, so that ``openenv validate --url`` passes: name, schemas, routes,
JSON-RPC. What needs a model is refused with the reason, in the form of its protocol.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import anyio.to_thread
from fastapi import APIRouter, Request
from starlette.responses import Response
from starlette.websockets import WebSocket, WebSocketDisconnect

from turnstile_server.control.body import json_bytes, json_response, parse_json
from turnstile_server.control.openenv.loader import import_openenv
from turnstile_server.control.openenv.openenv_parts import metadata
from turnstile_server.control.openenv.routes import (
    INVALID_REQUEST,
    PARSE_ERROR,
    SERVER_ERROR,
    rpc_error,
    ws_refusal,
)
from turnstile_server.errors import EngineUnavailable

WIRE = "turnstile_server.control.openenv.openenv_types"
"""The module that needs ``openenv-core``."""


def build_standby_router(reason: str, *, production: bool = False) -> APIRouter:
    """The routes of ``build_openenv_router``; those that need a model answer 503 with ``reason``."""
    router = APIRouter()
    missing = EngineUnavailable(reason)

    @router.get("/metadata")
    async def get_metadata() -> Response:
        return json_response(metadata())

    @router.get("/schema")
    async def get_schema() -> Response:
        # In a thread: the import takes seconds, and /health must answer meanwhile.
        return json_response(await anyio.to_thread.run_sync(_schemas))

    @router.post("/mcp")
    async def mcp(request: Request) -> Response:
        return json_response(rpc_answer(await request.body()))

    def rpc_answer(text: str | bytes) -> dict[str, Any]:
        try:
            message = parse_json(text)
        except ValueError as error:
            return rpc_error(PARSE_ERROR, f"not JSON: {error}")
        if not isinstance(message, dict) or message.get("jsonrpc") != "2.0":
            return rpc_error(INVALID_REQUEST, "not a JSON-RPC request")
        return rpc_error(SERVER_ERROR, missing.message, missing.type, message.get("id"))

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


def _schemas() -> dict[str, Any]:
    found: dict[str, Any] = import_openenv(WIRE).schemas()
    return found
