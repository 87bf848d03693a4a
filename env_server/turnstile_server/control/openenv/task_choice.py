"""The task of a ``reset`` that names none.

With a seed: by the seed, as the Gymnasium environment does it, so that equal seeds play equal tasks. Without one,
an environment that had a seed before goes on by it. Otherwise tasks are taken in the order of the server's
catalogue, one after another over all environments, so that loops over several sockets go through all of them.
With a split the same holds for its tasks, and ``index`` counts among them.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from turnstile.models.draw import draw_position, draw_seed, generator_of
from turnstile_server.errors import InvalidRequest, Unprocessable
from turnstile_server.tasks.catalog import TaskCatalog

NO_TASKS = (
    "this server has no tasks to choose from: start it with --tasks SOURCE, or give reset a task of yours "
    '(task={"instruction": "…"})'
)


class TaskOrder:
    """The tasks of a server in their order, by split, and which comes next."""

    def __init__(self, catalog: TaskCatalog | None) -> None:
        self._all: Sequence[str] = catalog.ids if catalog is not None else ()
        self.splits = catalog.splits if catalog is not None else {}
        self._next: dict[str | None, int] = {}

    def ids(self, split: str | None) -> Sequence[str]:
        """The ids of a split; None: all. Raises InvalidRequest for a split that there is not."""
        if split is None:
            return self._all
        if split not in self.splits:
            have = ", ".join(self.splits) or "none"
            raise InvalidRequest(f"there is no split {split!r}; there are: {have}")
        return self.splits[split]

    def at(self, split: str | None, index: int) -> str:
        """The id at a position, from 0; without a split, among all tasks. Raises InvalidRequest."""
        ids = self.ids(split)
        if not 0 <= index < len(ids):
            where = "this server" if split is None else f"the split {split!r}"
            raise InvalidRequest(f"index {index}: {where} has {len(ids)} tasks, counted from 0")
        return ids[index]

    def next(self, split: str | None) -> str:
        """The next task's id; after the last comes the first. Raises Unprocessable where there is none."""
        ids = self.ids(split)
        if not ids:
            raise Unprocessable(NO_TASKS)
        position = self._next.get(split, 0)
        self._next[split] = (position + 1) % len(ids)
        return ids[position]


class TaskChoice:
    """The choices of one environment. ``order`` is shared by all environments of the server."""

    def __init__(self, order: TaskOrder) -> None:
        self._order = order
        self._generator: np.random.Generator | None = None

    def seed(self, seed: int | None) -> None:
        """Begin again by ``seed``, if there is one."""
        if seed is not None:
            self._generator = generator_of(seed)

    def choose(self, seed: int | None, split: str | None, index: int | None) -> tuple[str, int | None]:
        """A task's id and the episode's seed: ``seed`` if given, else a drawn one where tasks are drawn.
        Raises Unprocessable where there are no tasks, and InvalidRequest for a split or index that is not."""
        if index is not None:
            return self._order.at(split, index), seed
        ids = self._order.ids(split)
        if self._generator is None or not ids:
            return self._order.next(split), seed
        task_id = ids[draw_position(self._generator, len(ids))]
        return task_id, seed if seed is not None else draw_seed(self._generator)
