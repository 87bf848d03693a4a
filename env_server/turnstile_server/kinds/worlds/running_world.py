"""The world of one episode, for its owner task: opened, reset, asked, graded, closed.

Joins a world with the episode: its seed, its sandbox, the rewards of its turns.
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from numbers import Real

from turnstile_server.errors import AgentFailed, FinishedEarly, TaskFailed
from turnstile_server.kinds.worlds.definition import WorldDefinition
from turnstile_server.kinds.worlds.episode_world import EpisodeWorld, Worlds
from turnstile_server.kinds.worlds.served import world_tools
from turnstile_server.kinds.worlds.untouched import UntouchedWorlds
from turnstile_server.tasks.environment import EnvironmentHost, EpisodeStart
from turnstile_server.tools.protocol import EpisodeTools, ServedTool


class RunningWorld:
    """Implements ``EpisodeEnvironment``. Not opened before ``reset``, so an episode in the queue costs nothing."""

    def __init__(self, definition: WorldDefinition, host: EnvironmentHost, worlds: Worlds) -> None:
        self.place = f"world {definition.name}"
        self._definition = definition
        self._host = host
        self._worlds = worlds
        self._untouched = UntouchedWorlds(worlds, definition, host.episode_id)
        self._world: EpisodeWorld | None = None
        self._seed: int | None = None
        self._ready = False
        self._unusable_reward: str | None = None
        self._turn_rewards: dict[str, float] = {}

    @property
    def talks(self) -> bool:
        """See ``EpisodeEnvironment``."""
        return self._definition.talks

    @property
    def turn_rewards(self) -> Mapping[str, float]:
        """See ``EpisodeEnvironment``: those that its tools gave."""
        return self._turn_rewards

    async def reset(self, seed: int | None) -> EpisodeStart:
        """See ``EpisodeEnvironment``."""
        self._world = self._worlds.open(self._definition, self._host.episode_id)
        self._world.on_step_reward = self._reward_turn
        self._seed = seed
        start = await self._world.reset(seed, self._host.instruction)
        if start.files and not self._definition.world_class.needs_sandbox:
            raise TaskFailed(f"{self.place}: reset gives files, but the world has needs_sandbox = False")
        return EpisodeStart(start.instruction, start.files)

    @asynccontextmanager
    async def open(self, episode: EpisodeTools) -> AsyncIterator[Sequence[ServedTool]]:
        """See ``OwnTools``: the agent may begin now. The world itself outlives its tools, to be graded."""
        yield world_tools(self._begun())

    def _begun(self) -> EpisodeWorld:
        """The world, which may use the sandbox from now on."""
        world = self._world
        assert world is not None  # `reset` is the first call
        if not self._ready:
            world.show_sandbox(self._host.sandbox)
            self._ready = True
        return world

    async def respond(self, answer: str) -> str | None:
        """See ``EpisodeEnvironment``."""
        if self._world is None:
            return None
        try:
            return await self._world.respond(answer)
        except TaskFailed as error:
            if await self._untouched.can_respond(self._seed):
                raise AgentFailed(
                    f"{error.message}; it answers a plain message, so the agent's made it fail"
                ) from error
            raise

    async def grade(self, answer: str | None) -> Mapping[str, float] | None:
        """See ``EpisodeEnvironment``. A world that no agent touched tells who made this one fail."""
        if self._unusable_reward is not None:
            # A world that no agent touched gives no such reward, so what this one did made it.
            raise AgentFailed(self._unusable_reward)
        if not self._definition.graded:
            return None
        if self._host.proof:
            return await self._begun().grade(answer)
        if self._world is None or not self._ready:
            raise FinishedEarly("the agent was finished before the episode ran, so its world cannot grade it")
        try:
            return await self._world.grade(answer)
        except TaskFailed as error:
            if await self._untouched.can_be_graded(self._seed):
                why = "a world that no agent touched can be graded, so what this one did made it fail"
                raise AgentFailed(f"{error.message}; {why}") from error
            raise

    async def solve(self) -> str | None:
        """See ``EpisodeEnvironment``."""
        return await self._begun().solve() if self._definition.solvable else None

    def _reward_turn(self, reward: object) -> None:
        """Several tools of one turn add up. What is no number costs the agent its reward."""
        turn_id = self._host.turn_id()
        if turn_id is None:
            return
        total = float(reward) + self._turn_rewards.get(turn_id, 0.0) if isinstance(reward, Real) else math.nan
        low, high = self._host.turn_bounds or (-math.inf, math.inf)
        if not math.isfinite(total) or not low <= total <= high:
            self._unusable_reward = (
                f"world {self._definition.name}: step_reward is {reward!r:.100}, which is no finite number in the "
                "task's bounds (reward.turn_bounds)"
            )
        else:
            self._turn_rewards[turn_id] = total

    async def close(self) -> None:
        """Never raises; may be repeated."""
        if self._world is not None:
            await self._world.close()
