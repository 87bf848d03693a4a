"""WebSockets of OpenEnv through the process in front: each socket is one worker's, from its first frame on.

A socket belongs to the session that its address names; else its first frame says where: to the group or the
episode that a ``reset`` names, or to the least busy worker. What must hold: frames pass in both directions as they
are and in their order; who hangs up on one side is told on the other; an id that another worker has is refused as
one server would refuse it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AsyncExitStack
from typing import Any, Final

import aiohttp
import anyio
import orjson
from fastapi import APIRouter
from starlette.websockets import WebSocket, WebSocketDisconnect
from yarl import URL

from turnstile_server.control.body import json_bytes
from turnstile_server.control.openenv.openenv_wire import JsonRpcErrorCode, rpc_error
from turnstile_server.errors import TurnstileError
from turnstile_server.workers.creation import Creations, WantedEpisode
from turnstile_server.workers.forward import passed_headers
from turnstile_server.workers.link import WorkerLink

_LOG = logging.getLogger(__name__)
SERVICE_RESTART: Final = 1012
"""Close code (registry of RFC 6455): the worker of this socket has ended."""
_GOING_AWAY: Final = 1001
_CREATES: Final = ('"reset"', "openenv/session/create", "tools/call", "call_tool")
"""Texts of a frame that may begin an episode."""
_OF_A_HANDSHAKE: Final = (
    "sec-websocket-key",
    "sec-websocket-version",
    "sec-websocket-extensions",
    "content-length",
)
_Refuse = Callable[[TurnstileError, Any], str]


def wanted_of(frame: str) -> tuple[WantedEpisode, Any]:
    """The episode that a frame asks for, and the id of its JSON-RPC message, if it is one."""
    if not any(part in frame for part in _CREATES):
        return WantedEpisode(), None
    try:
        said = orjson.loads(frame)
    except orjson.JSONDecodeError:
        return WantedEpisode(), None
    if not isinstance(said, dict):
        return WantedEpisode(), None
    message = said.get("data") if said.get("type") == "mcp" else said
    if isinstance(message, dict) and message.get("method") == "openenv/session/create":
        return WantedEpisode.of_fields(message.get("params")), message.get("id")
    return (WantedEpisode.of_fields(said.get("data")) if said.get("type") == "reset" else WantedEpisode()), None


def build_socket_router(creations: Creations, closing: anyio.Event) -> APIRouter:
    """``/ws`` and ``/mcp``. ``closing``: the server stops."""
    router = APIRouter()

    @router.websocket("/ws")
    async def ws(websocket: WebSocket) -> None:
        await _Relay(websocket, creations, closing, _frame_refusal).run()

    @router.websocket("/mcp")
    async def mcp(websocket: WebSocket) -> None:
        await _Relay(websocket, creations, closing, _rpc_refusal).run()

    return router


def _frame_refusal(error: TurnstileError, _request_id: Any) -> str:
    data = {"message": error.message, "code": "EXECUTION_ERROR", "type": error.type}
    return json_bytes({"type": "error", "data": data}).decode()


def _rpc_refusal(error: TurnstileError, request_id: Any) -> str:
    return json_bytes(
        rpc_error(JsonRpcErrorCode.SERVER_ERROR, error.message, request_id, {"type": error.type})
    ).decode()


class _Relay:
    def __init__(self, websocket: WebSocket, creations: Creations, closing: anyio.Event, refuse: _Refuse) -> None:
        self._client = websocket
        self._creations = creations
        self._closing = closing
        self._refuse = refuse
        self._session = websocket.query_params.get("session_id")
        self._promises = AsyncExitStack()
        """The promises for the episode that began last. The worker's events tell which one it is."""

    async def run(self) -> None:
        await self._client.accept()
        async with self._promises:
            try:
                first, wanted, request_id = None, WantedEpisode(), None
                if self._session is not None:
                    wanted = WantedEpisode(episode_ids=(self._session,))
                else:
                    first = await self._client.receive()
                    if first["type"] != "websocket.receive":
                        return
                    wanted, request_id = wanted_of(first.get("text") or "")
                try:
                    link = await self._creations.place(wanted, self._promises, once=False)
                    await link.wait_up()
                except TurnstileError as error:
                    await self._client.send_text(self._refuse(error, request_id))
                    await self._client.close(SERVICE_RESTART)
                    return
                await self._with(link, first)
            except WebSocketDisconnect:
                return  # the client left while it was answered

    async def _with(self, link: WorkerLink, first: Any) -> None:
        headers = passed_headers(self._client.scope, link, trust_forwarded=self._creations.trust_forwarded)
        for name in _OF_A_HANDSHAKE:
            headers.popall(name, None)
        url = URL(f"http://localhost{self._client.scope['path']}")
        if self._session is not None:
            url = url.with_query(session_id=self._session)
        try:
            upstream = await link.session.ws_connect(url, headers=headers, max_msg_size=0, autoping=True)
        except aiohttp.ClientError as error:
            _LOG.warning("a WebSocket could not be passed to worker %d: %r", link.number, error)
            await self._client.send_text(self._refuse(link.broken(error), None))
            await self._client.close(SERVICE_RESTART)
            return
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._to_client, upstream, tasks.cancel_scope)
                if first is not None:
                    await _send(upstream, first)
                await self._to_worker(upstream, link)
                tasks.cancel_scope.cancel()
        finally:
            with anyio.CancelScope(shield=True), anyio.move_on_after(5.0):
                await upstream.close()

    async def _to_worker(self, upstream: aiohttp.ClientWebSocketResponse, link: WorkerLink) -> None:
        """Until the client hangs up."""
        while True:
            message = await self._client.receive()
            if message["type"] != "websocket.receive":
                return
            await self._pass(message, upstream, link)

    async def _pass(self, message: Any, upstream: aiohttp.ClientWebSocketResponse, link: WorkerLink) -> None:
        wanted, request_id = wanted_of(message.get("text") or "")
        if wanted != WantedEpisode():
            await self._promises.aclose()  # the one before is answered, or is about to be
            try:
                await self._creations.place(wanted, self._promises, at=link, once=False)
            except TurnstileError as error:
                await self._client.send_text(self._refuse(error, request_id))
                return
        await _send(upstream, message)

    async def _to_client(self, upstream: aiohttp.ClientWebSocketResponse, scope: anyio.CancelScope) -> None:
        """Until the worker closes the socket, or ends."""
        async for message in upstream:
            if message.type is aiohttp.WSMsgType.TEXT:
                await self._client.send_text(message.data)
            elif message.type is aiohttp.WSMsgType.BINARY:
                await self._client.send_bytes(message.data)
        code = upstream.close_code
        if code is None or code == aiohttp.WSCloseCode.ABNORMAL_CLOSURE:
            code = _GOING_AWAY if self._closing.is_set() else SERVICE_RESTART
        await self._client.close(code)
        scope.cancel()


async def _send(upstream: aiohttp.ClientWebSocketResponse, message: Any) -> None:
    text = message.get("text")
    if text is not None:
        await upstream.send_str(text)
    else:
        await upstream.send_bytes(message["bytes"])
