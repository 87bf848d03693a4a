"""The environment of a task that is a Python class."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from turnstile_server.kinds.worlds.definition import WorldDefinition
from turnstile_server.kinds.worlds.episode_world import Worlds
from turnstile_server.kinds.worlds.running_world import RunningWorld
from turnstile_server.kinds.worlds.scores import COMPONENT
from turnstile_server.tasks.environment import EnvironmentHost, EpisodeEnvironment, TaskEnvironment


@dataclass(frozen=True, slots=True)
class WorldEnvironment(TaskEnvironment):
    """Opens a world of the class for each episode."""

    definition: WorldDefinition

    @property
    def name(self) -> str:
        return f"world {self.definition.name}"

    @property
    def component(self) -> str | None:
        return COMPONENT if self.definition.graded else None

    @property
    def unsolvable(self) -> str | None:
        return None if self.definition.solvable else "its world has no `solve`"

    @property
    def offers_sandbox(self) -> bool:
        return self.definition.world_class.needs_sandbox

    @property
    def tool_names(self) -> Sequence[str]:
        return [tool.signature.spec.name for tool in self.definition.tools]

    def shown(self) -> Mapping[str, Any]:
        definition = self.definition
        return {
            "class": definition.name,
            "parameters": dict(definition.parameters),
            "seed": definition.seed,
        }

    def open(self, host: EnvironmentHost) -> EpisodeEnvironment:
        """See ``TaskEnvironment``. All of a server count in ``worlds.max_open``."""
        return RunningWorld(self.definition, host, host.shared.get(Worlds, lambda: Worlds(host.settings)))
