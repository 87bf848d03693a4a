"""Who made a world fail: its own code, or what the agent did with it. A second world tells: none touched it.

A world that cannot be graded, or a user who cannot be played, leaves an episode without a reward. An agent must
not be able to choose that (``docs/errors.md``), and from an exception alone nobody can say whose doing it was. So
the call that failed is made on a new world of the same task and seed: where it fails there too, the task is
broken; where it does not, the agent made it fail.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import anyio

from turnstile_server.errors import TaskFailed, TurnstileError, WorldUnavailable
from turnstile_server.kinds.worlds.definition import WorldDefinition
from turnstile_server.kinds.worlds.episode_world import EpisodeWorld, Worlds

PLAIN_MESSAGE = "Hello."
"""Plain message for a user that failed to answer the agent. Also the instruction, where ``reset`` gives none."""


class UntouchedWorlds:
    """Makes the second worlds of one episode. They have no sandbox, and count in ``worlds.max_open``."""

    def __init__(self, worlds: Worlds, definition: WorldDefinition, episode_id: str) -> None:
        self._worlds = worlds
        self._definition = definition
        self._episode_id = f"{episode_id}-untouched"

    async def can_be_graded(self, seed: int | None) -> bool:
        """True if ``grade`` returns a score, for the known solution or for a world in which nothing was done.

        A ``grade`` that comes as far as the sandbox, which is not there, counts as one that does. So does a world
        for which there is no room: an agent may have taken it up.
        """

        async def solved(world: EpisodeWorld) -> None:
            await world.grade(await world.solve())

        async def nothing_done(world: EpisodeWorld) -> None:
            await world.grade(None)

        with_solution = self._definition.solvable and await self._works(seed, solved)
        return with_solution or await self._works(seed, nothing_done)

    async def can_respond(self, seed: int | None) -> bool:
        """True if the user has an answer to a plain message."""

        async def greeted(world: EpisodeWorld) -> None:
            await world.respond(PLAIN_MESSAGE)

        return await self._works(seed, greeted)

    async def _works(self, seed: int | None, use: Callable[[EpisodeWorld], Awaitable[None]]) -> bool:
        try:
            world = self._worlds.open(self._definition, self._episode_id)
        except WorldUnavailable:
            return True
        try:
            await world.reset(seed, PLAIN_MESSAGE)
            sandbox = world.show_sandbox(lambda: None)
            try:
                await use(world)
            except TaskFailed:
                return sandbox.asked and self._definition.world_class.needs_sandbox
        except TurnstileError:
            return False
        finally:
            with anyio.CancelScope(shield=True):
                await world.close()
        return True
