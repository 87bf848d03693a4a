"""The tools of an episode's world, as the toolbox serves them."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from turnstile_server.errors import TurnstileError
from turnstile_server.kinds.worlds.definition import WorldToolMethod
from turnstile_server.kinds.worlds.episode_world import EpisodeWorld
from turnstile_server.kinds.worlds.thread import WorldBusy, WorldRaised
from turnstile_server.kinds.worlds.world import ToolError, World
from turnstile_server.tools.protocol import EpisodeTools, Progress, ServedTool, ToolResult, ToolSpec

_LOG = logging.getLogger(__name__)


def world_tools(world: EpisodeWorld) -> tuple[ServedTool, ...]:
    return tuple(WorldTool(world, method) for method in world.definition.tools)


@dataclass(frozen=True, slots=True)
class WorldTool:
    """A ``ServedTool``: a method of the episode's own world. The toolbox bounds its arguments, time and result."""

    world: EpisodeWorld
    method: WorldToolMethod

    @property
    def spec(self) -> ToolSpec:
        return self.method.signature.spec

    async def call(self, episode: EpisodeTools, arguments: Mapping[str, Any], progress: Progress) -> ToolResult:
        """See ``ServedTool``. What the method raises is a result: the agent may go on."""
        name, signature = self.spec.name, self.method.signature
        given = signature.arguments(arguments)

        def run(world: World) -> object:
            method = getattr(world, self.method.method)
            return method(**given)

        try:
            returned = await self.world.run_tool(name, run)
        except WorldBusy as busy:
            return ToolResult(f"{name} did not run: {busy.running} has not returned yet", is_error=True)
        except WorldRaised as raised:
            error = raised.error
            if isinstance(error, ToolError):
                return ToolResult(str(error), is_error=True)
            if isinstance(error, TurnstileError):  # its sandbox died under it
                raise error from None
            _LOG.error(
                "tool %s of world %s failed",
                name,
                self.world.definition.name,
                exc_info=error,
                extra={"episode_id": episode.episode_id},
            )
            return ToolResult(f"{name} failed: {self.world.shown(error)}", is_error=True)
        return signature.result(returned)
