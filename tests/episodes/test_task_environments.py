"""A task source of another package gives its tasks an environment, which is played as a world is."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from turnstile.models import EpisodeStatus
from turnstile_server.settings import TaskSettings
from turnstile_server.tasks.environment import EnvironmentHost, EpisodeStart, TaskEnvironment
from turnstile_server.tasks.model import Task
from turnstile_server.tasks.protocol import FoundTask, Recognition
from turnstile_server.testing.world_play import WorldAgent, world_server
from turnstile_server.tools.protocol import EpisodeTools, Progress, ServedTool, ToolResult, ToolSpec

pytestmark = pytest.mark.anyio
CLOSED: list[str] = []


@dataclass
class Lamp:
    """The environment of one episode: a lamp that is to be on."""

    host: EnvironmentHost
    place: str = "the lamp"
    talks: bool = True
    turn_rewards: Mapping[str, float] = field(default_factory=dict)
    on: bool = False

    async def reset(self, seed: int | None) -> EpisodeStart:
        return EpisodeStart(f"{self.host.instruction} Seed {seed}.", {})

    @asynccontextmanager
    async def open(self, episode: EpisodeTools) -> AsyncIterator[Sequence[ServedTool]]:
        yield (Switch(self),)

    async def respond(self, answer: str) -> str | None:
        return None if self.on else "It is dark."

    async def grade(self, answer: str | None) -> Mapping[str, float]:
        return {"lit": float(self.on), "polite": 0.5}

    async def solve(self) -> str | None:
        self.on = True
        return "Done."

    async def close(self) -> None:
        CLOSED.append(self.host.episode_id)


@dataclass
class Switch:
    """The tool that switches the lamp on."""

    lamp: Lamp

    @property
    def spec(self) -> ToolSpec:
        return ToolSpec("switch", "Switches the lamp on.", {"type": "object", "properties": {}})

    async def call(self, episode: EpisodeTools, arguments: Mapping[str, Any], progress: Progress) -> ToolResult:
        self.lamp.on = True
        return ToolResult("click")


@dataclass(frozen=True)
class LampEnvironment(TaskEnvironment):
    name: str = "lamp"
    component: str | None = "lamp"
    unsolvable: str | None = None
    offers_sandbox: bool = False
    tool_names: Sequence[str] = ("switch",)

    def shown(self) -> Mapping[str, Any]:
        return {"kind": "lamp"}

    def open(self, host: EnvironmentHost) -> Lamp:
        return Lamp(host)


class Lamps:
    """A ``TaskSource``."""

    recognition = Recognition.SCHEME

    def recognises(self, source: str) -> bool:
        return source.startswith("lamps:")

    def host_paths(self, source: str) -> Sequence[Path]:
        return ()

    def load(self, source: str, settings: TaskSettings) -> Iterator[FoundTask]:
        task = Task(id="lamp", instruction="Make light.")
        yield FoundTask(task.model_copy(update={"environment": LampEnvironment()}), source)


async def test_it_is_reset_asked_scored_and_closed() -> None:
    said: list[str | None] = []

    async def agent(world: WorldAgent) -> None:
        assert (world.instruction, "switch" in world.tools) == ("Make light. Seed 7.", True)
        said.append((await world.submit("Done?")).user)
        assert (await world.call("switch")).text == "click"
        said.append((await world.submit("Done.")).user)

    async with world_server(f"{__name__}:Lamps=lamps:one") as server:
        episode = await server.play(agent, task="lamp", seed=7)
    assert (episode.status, said) == (EpisodeStatus.COMPLETED, ["It is dark.", None])
    assert (episode.reward, episode.reward_components) == (0.5, {"lit": 1.0, "polite": 0.5})
    assert episode.grading["summary"] == ["lamp: polite is 0.5"]
    assert [episode.episode_id] == CLOSED
