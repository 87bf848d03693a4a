"""The task of a ``reset`` that names none.

With a seed: by the seed, as the Gymnasium environment does it, so that equal seeds play equal tasks. Without one,
an environment that had a seed before goes on by it. Otherwise tasks are taken in the order of the server's
catalogue, one after another over all environments, so that loops over several sockets go through all of them.
"""

from __future__ import annotations

import numpy as np

from turnstile.models.draw import draw_position, draw_seed, generator_of
from turnstile_server.errors import Unprocessable
from turnstile_server.tasks.catalog import TaskCatalog

NO_TASKS = (
    "this server has no tasks to choose from: start it with --tasks SOURCE, or give reset a task of yours "
    '(task={"instruction": "…"})'
)


class TaskOrder:
    """The tasks of a server in their order, and which comes next."""

    def __init__(self, catalog: TaskCatalog | None) -> None:
        self.ids = catalog.ids if catalog is not None else ()
        self._next = 0

    def next(self) -> str:
        """The next task's id; after the last comes the first. Raises Unprocessable where there is none."""
        if not self.ids:
            raise Unprocessable(NO_TASKS)
        found = self.ids[self._next]
        self._next = (self._next + 1) % len(self.ids)
        return found


class TaskChoice:
    """The choices of one environment. ``order`` is shared by all environments of the server."""

    def __init__(self, order: TaskOrder) -> None:
        self._order = order
        self._generator: np.random.Generator | None = None

    def seed(self, seed: int | None) -> None:
        """Begin again by ``seed``, if there is one."""
        if seed is not None:
            self._generator = generator_of(seed)

    def choose(self, seed: int | None) -> tuple[str, int | None]:
        """A task's id and the episode's seed: ``seed`` if given, else a drawn one where tasks are drawn.
        Raises Unprocessable where there are no tasks."""
        if self._generator is None or not self._order.ids:
            return self._order.next(), seed
        task_id = self._order.ids[draw_position(self._generator, len(self._order.ids))]
        return task_id, seed if seed is not None else draw_seed(self._generator)
