"""Where tasks come from."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from turnstile_server.tasks.model import Task


class TaskSource(Protocol):
    """Tasks by id. Loaded and checked when the server starts; a later change of the task files is not seen (the
    files of a task's folders are read when they are used)."""

    def get(self, task_id: str) -> Task:
        """Raises NotFound, naming ids that are close."""
        ...

    def __iter__(self) -> Iterator[Task]: ...

    def __len__(self) -> int: ...
