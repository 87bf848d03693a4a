"""What an agent reaches: the tool door at ``/e/{episode_id}/mcp``, the gate everywhere else."""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send

from turnstile_server.agent_request import split_path
from turnstile_server.tools.door import TOOL_PATH


class AgentDoor:
    """The ASGI application of the agent listener and of every sandbox's socket."""

    def __init__(self, gate: ASGIApp, tools: ASGIApp) -> None:
        self._gate = gate
        self._tools = tools

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        episode_id, path = split_path(scope["path"])
        app = self._tools if episode_id and path.rstrip("/") == TOOL_PATH else self._gate
        await app(scope, receive, send)
