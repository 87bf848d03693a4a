"""The application that an agent reaches: the MCP endpoint at ``/e/{episode_id}/mcp``, the model API (the gate)
everywhere else.

No WebSocket is served. The gate answers the handshake of one like the GET that it is, so that the client learns
over HTTP to come back without it. (Codex does so at once; otherwise it keeps trying for seconds.)
"""

from __future__ import annotations

from collections.abc import Awaitable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from turnstile_server.http.exchange import split_path

TOOL_PATH = "/mcp"
"""Path of the MCP endpoint below ``/e/{episode_id}``."""


class AgentApp:
    """The ASGI application of the agent listener and of every sandbox's socket."""

    def __init__(self, gate: ASGIApp, tools: ASGIApp) -> None:
        self._gate = gate
        self._tools = tools

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        if scope["type"] == "websocket":
            handshake = {**scope, "type": "http", "method": "GET"}
            return self._gate(handshake, receive, _reply_to_handshake(send))
        is_tools = (
            scope["type"] == "http" and scope["path"].rstrip("/").endswith(TOOL_PATH) and _names_tools(scope)
        )
        return (self._tools if is_tools else self._gate)(scope, receive, send)


def _names_tools(scope: Scope) -> bool:
    episode_id, path = split_path(scope["path"])
    return bool(episode_id) and path.rstrip("/") == TOOL_PATH


def _reply_to_handshake(send: Send) -> Send:
    """Sends an HTTP response in reply to a handshake (ASGI's extension ``websocket.http.response``)."""

    async def reply(message: Message) -> None:
        await send({**message, "type": f"websocket.{message['type']}"})

    return reply
