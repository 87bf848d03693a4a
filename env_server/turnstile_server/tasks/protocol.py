"""Where tasks come from: the seam for task sources, and the catalog that they are loaded into."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from turnstile_server.errors import NotFound
from turnstile_server.settings import TaskSettings
from turnstile_server.tasks.model import Task


@dataclass(frozen=True, slots=True)
class FoundTask:
    """A task and where it is defined."""

    task: Task
    file: str
    """File, URL or data set that defines it, for messages."""
    line: int | None = None
    """Line on which its definition begins, 1-based."""
    id_line: int | None = None
    """Line of its id, where that is another one."""

    @property
    def place(self) -> str:
        return self.file if self.line is None else f"{self.file}:{self.line}"


@dataclass(frozen=True, slots=True)
class TaskProblem:
    """One thing that is wrong with the definition of a task."""

    file: str
    line: int | None
    field: str | None
    """Path of the field in the task, dotted: ``tests.files.folder``."""
    message: str

    def __str__(self) -> str:
        where = self.file if self.line is None else f"{self.file}:{self.line}"
        return f"{where}: {self.field}: {self.message}" if self.field else f"{where}: {self.message}"


class TaskSource(Protocol):
    """A kind of task source: files, a data set, a hub. One object serves every SOURCE string of its kind."""

    def recognises(self, source: str) -> bool:
        """Whether ``source`` (an item of ``tasks.sources``) is of this kind: by a scheme, or by what the path
        holds. Cheap: nothing is loaded or fetched."""
        ...

    def load(self, source: str, settings: TaskSettings) -> Iterator[FoundTask | TaskProblem]:
        """Every task of ``source``, in a fixed order, and everything that is wrong with it. Does not raise for a
        bad source: that is a TaskProblem, so that all of them are reported at once."""
        ...

    def host_paths(self, source: str) -> Sequence[Path]:
        """Files and folders of this machine that hold the source's tasks. Local sandboxes never show them: hidden
        tests and solutions are in them."""
        ...


class TaskCatalog:
    """Tasks by id, in the order of their sources.

    They are loaded and checked when the server starts. A later change of a definition is not seen; the files of a
    task's folders are read when they are used.
    """

    def __init__(self, tasks: Sequence[Task]) -> None:
        self._tasks = {task.id: task for task in tasks}

    def get(self, task_id: str) -> Task:
        """Raises NotFound, naming ids that are close."""
        task = self._tasks.get(task_id)
        if task is None:
            close = difflib.get_close_matches(task_id, self._tasks, n=3, cutoff=0.5)
            hint = f" Close to it: {', '.join(close)}." if close else ""
            raise NotFound(f"There is no task {task_id!r}.{hint}", detail={"close": close})
        return task

    def __iter__(self) -> Iterator[Task]:
        return iter(self._tasks.values())

    def __len__(self) -> int:
        return len(self._tasks)
