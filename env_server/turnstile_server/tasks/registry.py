"""The task sources, and how every SOURCE string becomes tasks.

A new kind of source is one module with a ``TaskSource`` and one line in ``TASK_SOURCES``. The first that
recognises a SOURCE loads it. ``TaskFiles`` is the last: it takes every path, and reports one that is not there.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from turnstile_server.errors import StartupError
from turnstile_server.settings import TaskSettings
from turnstile_server.tasks.model import Task
from turnstile_server.tasks.protocol import FoundTask, TaskCatalog, TaskProblem, TaskSource
from turnstile_server.tasks.task_files import SHIPPED, TaskFiles
from turnstile_server.tasks.world_source import WorldClasses

TASK_SOURCES: list[TaskSource] = [
    WorldClasses(),
    TaskFiles(),
]

SHOWN_PROBLEMS = 50


def load_tasks(sources: Sequence[str | Path], settings: TaskSettings | None = None) -> TaskCatalog:
    """Every task of ``sources``; of none, the shipped ones.

    Raises StartupError: its message has a line per problem (file, line, field), its detail the same as records.
    """
    settings = settings or TaskSettings()
    tasks: list[Task] = []
    problems: list[TaskProblem] = []
    defined: dict[str, str] = {}
    """Where each id was first defined."""
    for source in map(str, sources or [SHIPPED]):
        for found in _kind_of(source).load(source, settings):
            if isinstance(found, TaskProblem):
                problems.append(found)
            elif (first := defined.setdefault(found.task.id, found.place)) != found.place:
                problems.append(_twice(found, first))
            else:
                tasks.append(found.task)
    if problems:
        raise _unusable(problems)
    return TaskCatalog(tasks)


def host_paths(sources: Sequence[str]) -> tuple[Path, ...]:
    """Files and folders of this machine that hold the tasks of ``sources``."""
    return tuple(path for source in sources for path in _kind_of(source).host_paths(source))


def _kind_of(source: str) -> TaskSource:
    return next(kind for kind in TASK_SOURCES if kind.recognises(source))


def _twice(found: FoundTask, first: str) -> TaskProblem:
    line = found.line if found.id_line is None else found.id_line
    return TaskProblem(found.file, line, "id", f"{found.task.id!r} is already the id of {first}")


def _unusable(problems: Sequence[TaskProblem]) -> StartupError:
    lines = [str(problem) for problem in problems[:SHOWN_PROBLEMS]]
    if len(problems) > SHOWN_PROBLEMS:
        lines.append(f"and {len(problems) - SHOWN_PROBLEMS} more")
    detail = [{"file": one.file, "line": one.line, "field": one.field, "message": one.message} for one in problems]
    return StartupError("\n".join(["The tasks cannot be used.", *lines]), detail=detail)
