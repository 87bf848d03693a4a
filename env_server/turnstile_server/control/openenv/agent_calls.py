"""Model calls and tool calls of an external agent's client, made in its episode with the episode's key."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import httpx
from starlette.types import ASGIApp

from turnstile_server.control.body import json_bytes, parse_json
from turnstile_server.control.openenv.openenv_wire import OpenEnvToolError, ToolErrorType
from turnstile_server.errors import SandboxFailed, TurnstileError, error_of_type
from turnstile_server.tools.arguments import json_size
from turnstile_server.tools.protocol import ToolDirectory, ToolResult, ToolSpec
from turnstile_server.tools.toolbox import Toolbox


class ModelCalls:
    """Chat Completions in process, over ``gate``: the model API as an agent sees it over the network. Cancelling a
    call has the effect of a client that hangs up: the engine stops."""

    def __init__(self, gate: ASGIApp) -> None:
        self._transport = httpx.ASGITransport(app=gate)

    async def chat(self, episode_id: str, key: str, body: dict[str, Any]) -> dict[str, Any]:
        """The answer's body. Raises the error that the model API answered with."""
        request = httpx.Request(
            "POST",
            f"http://gate/e/{episode_id}/v1/chat/completions",
            headers={"authorization": f"Bearer {key}"},
            content=json_bytes(body),
        )
        response = await self._transport.handle_async_request(request)
        answer: dict[str, Any] = parse_json(await response.aread())
        if response.status_code != 200:
            error = answer["error"]
            raise error_of_type(error["code"], error["message"])
        return answer


@dataclass(frozen=True, slots=True)
class ToolAnswer:
    """``result`` is what the tool gave, also when the tool failed. Otherwise ``error`` says that there is no such
    tool, or that no tool could run."""

    result: ToolResult | None = None
    error: OpenEnvToolError | None = None


class EpisodeToolCalls:
    """``list_tools`` and ``call_tool`` of one episode."""

    def __init__(self, directory: ToolDirectory, toolbox: Toolbox) -> None:
        self._directory = directory
        self._toolbox = toolbox

    def known(self) -> Sequence[ToolSpec]:
        """All tools of the server; an episode may have fewer, and its task's beside them."""
        return self._toolbox.all_tools

    def of(self, episode_id: str, key: str) -> Sequence[ToolSpec]:
        """The episode's tools. Raises what ToolDirectory raises."""
        return self._toolbox.tools_of(self._directory.open_tools(episode_id, key))

    async def call(self, episode_id: str, key: str, name: str, arguments: dict[str, Any]) -> ToolAnswer:
        """Call a tool. Cancelling the call stops its command."""
        try:
            episode = self._directory.open_tools(episode_id, key)
            known = [spec.name for spec in self._toolbox.tools_of(episode)]
            if name not in known:
                with episode.recorded(name, json_size(arguments)) as span:
                    span.error = "tool_error"
                message = f"there is no tool {name!r} in this episode; there are {', '.join(known)}"
                return ToolAnswer(error=OpenEnvToolError(error_type=ToolErrorType.TOOL_NOT_FOUND, message=message))
            done = await self._toolbox.call(episode, name, arguments)
        except TurnstileError as error:
            lost = isinstance(error, SandboxFailed)
            kind = ToolErrorType.TRANSPORT_ERROR if lost else ToolErrorType.EXECUTION_ERROR
            return ToolAnswer(error=OpenEnvToolError(error_type=kind, message=f"{error.type}: {error.message}"))
        return ToolAnswer(done)
