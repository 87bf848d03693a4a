"""What an agent reaches: the tool door at ``/e/{episode_id}/mcp``, the gate everywhere else.

No WebSocket is served. The handshake of one is answered by the gate like the GET that it is, so that the client is
told in HTTP to come back without (Codex does so at once, and keeps trying for seconds otherwise).
"""

from __future__ import annotations

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from turnstile_server.http.agent_request import split_path
from turnstile_server.tools.endpoint import TOOL_PATH


class AgentApp:
    """The ASGI application of the agent listener and of every sandbox's socket."""

    def __init__(self, gate: ASGIApp, tools: ASGIApp) -> None:
        self._gate = gate
        self._tools = tools

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await self._gate({**scope, "type": "http", "method": "GET"}, receive, _handshake(send))
            return
        if scope["type"] != "http":
            return
        episode_id, path = split_path(scope["path"])
        app = self._tools if episode_id and path.rstrip("/") == TOOL_PATH else self._gate
        await app(scope, receive, send)


def _handshake(send: Send) -> Send:
    """Writes an HTTP response as the answer to a handshake (ASGI's extension ``websocket.http.response``)."""

    async def answer(message: Message) -> None:
        await send({**message, "type": f"websocket.{message['type']}"})

    return answer
