"""The task sources, and how every SOURCE string becomes tasks.

A new kind of source is one module with a ``TaskSource`` and one line in ``TASK_SOURCES``. The first that
recognises a SOURCE loads it. ``TaskFiles`` is the last: it takes every path, and reports one that is not there.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from turnstile_server.errors import StartupError
from turnstile_server.settings import TaskSettings
from turnstile_server.tasks.catalog import TaskCatalog
from turnstile_server.tasks.harbor.source import HarborFolders
from turnstile_server.tasks.model import Task
from turnstile_server.tasks.package_source import PackageTasks
from turnstile_server.tasks.protocol import FoundTask, StoredTask, TaskProblem, TaskSource
from turnstile_server.tasks.rows.source import TaskRows
from turnstile_server.tasks.task_files import SHIPPED, TaskFiles
from turnstile_server.tasks.world_source import WorldClasses

TASK_SOURCES: list[TaskSource] = [
    PackageTasks(),
    TaskRows(),
    WorldClasses(),
    HarborFolders(),
    TaskFiles(),
]

SHOWN_PROBLEMS = 50
KEPT_PROBLEMS = 1000
"""Of a large set every row may be wrong; further ones are only counted."""


def load_tasks(sources: Sequence[str | Path], settings: TaskSettings | None = None) -> TaskCatalog:
    """Every task of ``sources``; of none, the shipped ones.

    Raises StartupError: its message has a line per problem (file, line, field), its detail the same as records.
    """
    settings = settings or TaskSettings()
    tasks: list[Task | StoredTask] = []
    problems: list[TaskProblem] = []
    count = 0
    defined: dict[str, FoundTask | StoredTask] = {}
    """Where each id was first defined."""
    for source in map(str, sources or [SHIPPED]):
        for found in _kind_of(source).load(source, settings):
            if isinstance(found, FoundTask | StoredTask):
                task = found.task if isinstance(found, FoundTask) else found
                first = defined.setdefault(task.id, found)
                if first is found or first.place == found.place:
                    tasks.append(task)
                    continue
                problem = _twice(task.id, found, first.place)
            else:
                problem = found
            count += 1
            if count <= KEPT_PROBLEMS:
                problems.append(problem)
    if problems:
        raise _unusable(problems, count)
    return TaskCatalog(tasks, cached_tasks=settings.cached_rows)


def host_paths(sources: Sequence[str]) -> tuple[Path, ...]:
    """Files and folders of this machine that hold the tasks of ``sources``."""
    return tuple(path for source in sources for path in _kind_of(source).host_paths(source))


def _kind_of(source: str) -> TaskSource:
    return next(kind for kind in TASK_SOURCES if kind.recognises(source))


def _twice(task_id: str, found: FoundTask | StoredTask, first: str) -> TaskProblem:
    line, row = found.line, None
    if isinstance(found, StoredTask):
        row = found.row
    elif found.id_line is not None:
        line = found.id_line
    return TaskProblem(found.file, line, "id", f"{task_id!r} is already the id of {first}", row)


def _unusable(problems: Sequence[TaskProblem], count: int) -> StartupError:
    lines = [str(problem) for problem in problems[:SHOWN_PROBLEMS]]
    if count > SHOWN_PROBLEMS:
        lines.append(f"and {count - SHOWN_PROBLEMS} more")
    return StartupError("\n".join(["The tasks cannot be used.", *lines]), detail=list(map(_record, problems)))


def _record(problem: TaskProblem) -> dict[str, object]:
    found: dict[str, object] = {
        "file": problem.file,
        "line": problem.line,
        "field": problem.field,
        "message": problem.message,
    }
    return found if problem.row is None else {**found, "row": problem.row}
