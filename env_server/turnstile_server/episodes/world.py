"""The world of one running episode, for the owner task: opened, reset, asked, graded, closed.

Joins a task's world (``worlds/``) with the episode: its seed, its sandbox, its task as ``reset`` made it.
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from numbers import Real

from turnstile_server.episodes.sandbox import EpisodeSandbox
from turnstile_server.errors import AgentFailed, FinishedEarly, TaskFailed
from turnstile_server.sandboxes.protocol import Sandbox
from turnstile_server.settings import TaskSettings
from turnstile_server.tasks.model import Task
from turnstile_server.tasks.world_source import task_of_episode
from turnstile_server.tools.protocol import EpisodeTools, ServedTool
from turnstile_server.worlds.definition import WorldDefinition
from turnstile_server.worlds.episode_world import EpisodeWorld, Worlds
from turnstile_server.worlds.served import world_tools
from turnstile_server.worlds.untouched import UntouchedWorlds


class RunningWorld:
    """Implements ``OwnTools``. Not opened before ``reset``, so an episode in the queue costs nothing.

    ``sandbox_of`` gives the sandbox that the world may use, from the end of the preparation to the end of
    ``grade``.
    """

    def __init__(
        self,
        definition: WorldDefinition,
        worlds: Worlds,
        settings: TaskSettings,
        sandbox_of: Callable[[], Sandbox | None],
        turn_of: Callable[[], str | None],
    ) -> None:
        self.place = f"world {definition.name}"
        self._definition = definition
        self._worlds = worlds
        self._settings = settings
        self._sandbox_of = sandbox_of
        self._world: EpisodeWorld | None = None
        self._untouched: UntouchedWorlds | None = None
        self._seed: int | None = None
        self._ready = False
        self._turn_of = turn_of
        self._bounds: tuple[float, float] | None = None
        self._unusable_reward: str | None = None
        self.turn_rewards: dict[str, float] = {}
        """Rewards that its tools gave to the agent's turns, by turn id."""

    @staticmethod
    def of(
        task: Task,
        worlds: Worlds,
        settings: TaskSettings,
        sandbox: EpisodeSandbox | None,
        turn_of: Callable[[], str | None],
    ) -> RunningWorld | None:
        """The world of an episode of ``task``; None where it has none. ``turn_of``: the episode's latest turn."""
        if task.world is None:
            return None

        def sandbox_of() -> Sandbox | None:
            return None if sandbox is None else sandbox.for_world

        return RunningWorld(task.world, worlds, settings, sandbox_of, turn_of)

    async def reset(self, task: Task, episode_id: str, seed: int | None) -> Task:
        """Makes the world. The task as this episode has it. Raises TaskFailed, WorldUnavailable."""
        self._world = self._worlds.open(self._definition, episode_id)
        self._world.on_step_reward = self._reward_turn
        self._bounds = task.reward.turn_bounds
        self._untouched = UntouchedWorlds(self._worlds, self._definition, episode_id)
        self._seed = seed
        return task_of_episode(task, await self._world.reset(seed, task.instruction), self._settings)

    @asynccontextmanager
    async def open(self, episode: EpisodeTools) -> AsyncIterator[Sequence[ServedTool]]:
        """See ``OwnTools``: the agent may begin now. The world itself outlives its tools, to be graded."""
        world = self._world
        assert world is not None
        world.show_sandbox(self._sandbox_of)
        self._ready = True
        yield world_tools(world)

    @property
    def talks(self) -> bool:
        return self._definition.talks

    async def respond(self, answer: str) -> str | None:
        """The simulated user's reply to a submitted answer, if there is a user. Raises TaskFailed, and AgentFailed
        where the user can be played, but not with what this agent said."""
        if self._world is None or self._untouched is None:
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
        """None where the world does not grade. Raises TaskFailed, SandboxFailed; AgentFailed where a world that no
        agent touched can be graded; FinishedEarly where the caller finished the episode before the world was
        there."""
        if self._unusable_reward is not None:
            # A world that no agent touched gives no such reward, so what this one did made it.
            raise AgentFailed(self._unusable_reward)
        if not self._definition.graded:
            return None
        if self._world is None or self._untouched is None or not self._ready:
            raise FinishedEarly("the agent was finished before the episode ran, so its world cannot grade it")
        try:
            return await self._world.grade(answer)
        except TaskFailed as error:
            if await self._untouched.can_be_graded(self._seed):
                why = "a world that no agent touched can be graded, so what this one did made it fail"
                raise AgentFailed(f"{error.message}; {why}") from error
            raise

    def _reward_turn(self, reward: object) -> None:
        """Several tools of one turn add up. What is no number costs the agent its reward."""
        turn_id = self._turn_of()
        if turn_id is None:
            return
        total = float(reward) + self.turn_rewards.get(turn_id, 0.0) if isinstance(reward, Real) else math.nan
        low, high = self._bounds or (-math.inf, math.inf)
        if not math.isfinite(total) or not low <= total <= high:
            self._unusable_reward = (
                f"world {self._definition.name}: step_reward is {reward!r:.100}, which is no finite number in the "
                "task's bounds (reward.turn_bounds)"
            )
        else:
            self.turn_rewards[turn_id] = total

    async def close(self) -> None:
        """Never raises; may be repeated."""
        if self._world is not None:
            await self._world.close()
