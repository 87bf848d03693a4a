"""The tasks of a server: by id, in the order of their sources, and as selections of them.

Tasks of small sources are in memory. Of the tasks of large ones it knows ids, labels and positions; they are read
when they are used, and the latest few are kept for the further rollouts of their groups.
"""

from __future__ import annotations

import difflib
import threading
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import anyio.to_thread

from turnstile_server.errors import NotFound
from turnstile_server.tasks.model import Task
from turnstile_server.tasks.protocol import StoredTask
from turnstile_server.tasks.selection import TaskSelection, digest_of, labels_of

_KEPT_SELECTIONS = 8
"""Orders of ids; every page of a listing asks for the same one."""
DEFAULT_SPLIT = "train"
_CLOSE_AMONG = 20_000
"""Ids that are compared for a hint, which takes a quarter of a second for so many."""


@dataclass(frozen=True, slots=True)
class SelectedTasks:
    """Ids of a selection in their order, and the digest of all that its filter lets through."""

    ids: Sequence[str]
    digest: str


class TaskCatalog:
    """Tasks by id. They are found and checked when the server starts; a later change of a definition is not seen,
    or is TaskFailed. The files of a task's folders are read when they are used."""

    def __init__(
        self, tasks: Sequence[Task | StoredTask], *, cached_tasks: int = 64, left_out: Sequence[str] = ()
    ) -> None:
        """``left_out``: what is wrong with tasks of the same folders that cannot be used, as lines."""
        self.left_out = left_out
        self._tasks = {task.id: task for task in tasks}
        self._cached_tasks = cached_tasks
        self._cache: OrderedDict[str, Task] = OrderedDict()
        self._selections: OrderedDict[TaskSelection, SelectedTasks] = OrderedDict()
        self._lock = threading.Lock()
        """Guards both caches: pages are made in threads."""

    def get(self, task_id: str) -> Task:
        """Raises NotFound, naming ids that are close, and TaskFailed for one that has changed since the start."""
        task = self._tasks.get(task_id)
        if task is None:
            close = []
            if len(self._tasks) <= _CLOSE_AMONG:
                close = difflib.get_close_matches(task_id, self._tasks, n=3, cutoff=0.5)
            hint = f" Close to it: {', '.join(close)}." if close else ""
            if self.left_out:
                hint += " Some tasks of the same folders cannot be used: `turnstile tasks list` says why."
            raise NotFound(f"There is no task {task_id!r}.{hint}", detail={"close": close})
        return task if isinstance(task, Task) else self._stored(task)

    @property
    def graders(self) -> set[str]:
        """Names of the graders that tasks ask for."""
        asked = (_labels(task).get("graded_by", "").split(",") for task in self._tasks.values())
        return {name for names in asked for name in names if name}

    @property
    def with_images(self) -> Sequence[str]:
        """Ids of the tasks that name an image."""
        return [
            task.id
            for task in self._tasks.values()
            if (task.image is not None if isinstance(task, Task) else "image" in task.labels)
        ]

    async def prefetch(self, task_id: str | None) -> None:
        """Reads a task of a large set in a thread, so that ``get`` finds it in memory. Raises TaskFailed."""
        task = self._tasks.get(task_id or "")
        if isinstance(task, StoredTask) and task.id not in self._cache:
            await anyio.to_thread.run_sync(self._stored, task)

    @property
    def ids(self) -> Sequence[str]:
        return tuple(self._tasks)

    @cached_property
    def splits(self) -> Mapping[str, Sequence[str]]:
        """Ids by the label ``split``, in their order; a task without one is of DEFAULT_SPLIT."""
        found: dict[str, list[str]] = {}
        for task in self._tasks.values():
            found.setdefault(_labels(task).get("split") or DEFAULT_SPLIT, []).append(task.id)
        return {name: tuple(ids) for name, ids in found.items()}

    @property
    def in_memory(self) -> Iterator[Task]:
        """The tasks of small sources. Only these have tools and environments of their own."""
        return (task for task in self._tasks.values() if isinstance(task, Task))

    def select(self, selection: TaskSelection) -> SelectedTasks:
        """Raises InvalidRequest."""
        with self._lock:
            if (known := self._selections.get(selection)) is not None:
                self._selections.move_to_end(selection)
                return known
        ids = selection.filtered((task.id, _labels(task)) for task in self._tasks.values())
        made = SelectedTasks(selection.ordered(ids), digest_of(ids))
        with self._lock:
            self._selections[selection] = made
            if len(self._selections) > _KEPT_SELECTIONS:
                self._selections.popitem(last=False)
        return made

    def __iter__(self) -> Iterator[Task]:
        """Every task, one after the other; large sets are read as it goes. Raises TaskFailed as ``get`` does."""
        for task in self._tasks.values():
            yield task if isinstance(task, Task) else task.reader.read(task.position)

    def __len__(self) -> int:
        return len(self._tasks)

    def _stored(self, task: StoredTask) -> Task:
        with self._lock:
            if (known := self._cache.get(task.id)) is not None:
                self._cache.move_to_end(task.id)
                return known
        made = task.reader.read(task.position)
        with self._lock:
            self._cache[task.id] = made
            if len(self._cache) > self._cached_tasks:
                self._cache.popitem(last=False)
        return made


def _labels(task: Task | StoredTask) -> Mapping[str, str]:
    return labels_of(task) if isinstance(task, Task) else task.labels
