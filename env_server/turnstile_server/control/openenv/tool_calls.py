"""``list_tools`` and ``call_tool``: the episode's own tools, opened with the episode's own key."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from openenv.core.env_server.mcp_types import Tool, ToolError, ToolErrorType

from turnstile_server.errors import SandboxFailed, TurnstileError
from turnstile_server.tools.protocol import ToolDirectory
from turnstile_server.tools.toolbox import Toolbox, ToolSpec


@dataclass(frozen=True, slots=True)
class Said:
    """``result`` is the tool's own text, failures included (then ``is_error``); ``error``: there was no such
    tool, or no tool could run."""

    result: str | None = None
    is_error: bool = False
    error: ToolError | None = None


class EpisodeToolCalls:
    def __init__(self, directory: ToolDirectory, toolbox: Toolbox) -> None:
        self._directory = directory
        self._toolbox = toolbox

    def known(self) -> list[Tool]:
        """All tools there are; an episode may have fewer."""
        return [_as_tool(spec) for spec in self._toolbox.all_tools]

    def of(self, episode_id: str, key: str) -> list[Tool]:
        """The episode's tools. Raises what ToolDirectory raises."""
        return [_as_tool(spec) for spec in self._toolbox.tools_of(self._directory.open_tools(episode_id, key))]

    async def call(self, episode_id: str, key: str, name: str, arguments: dict[str, Any]) -> Said:
        """Cancelling the call stops its command."""
        try:
            episode = self._directory.open_tools(episode_id, key)
            known = [spec.name for spec in self._toolbox.tools_of(episode)]
            if name not in known:
                message = f"there is no tool {name!r} in this episode; there are {', '.join(known)}"
                return Said(error=ToolError(error_type=ToolErrorType.TOOL_NOT_FOUND, message=message))
            done = await self._toolbox.call(episode, name, arguments)
        except TurnstileError as error:
            lost = isinstance(error, SandboxFailed)
            kind = ToolErrorType.TRANSPORT_ERROR if lost else ToolErrorType.EXECUTION_ERROR
            return Said(error=ToolError(error_type=kind, message=f"{error.type}: {error.message}"))
        return Said(done.text, done.is_error)


def _as_tool(spec: ToolSpec) -> Tool:
    return Tool(name=spec.name, description=spec.description, input_schema=spec.input_schema)
