"""The task sources, the entry points of ``turnstile.task_sources``, and how every SOURCE string becomes tasks.

A source's object takes nothing and returns a ``TaskSource``. A SOURCE is loaded by the first that recognises it:
those that know it by a scheme are asked before those that look at its form, and these before the one that takes
any path. ``package.module:object=SOURCE`` names the task source itself, which no package need declare.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from turnstile.plugins import BrokenPlugin, Plugins, is_reference
from turnstile_server.errors import StartupError
from turnstile_server.settings import TaskSettings
from turnstile_server.tasks.bounds import TaskBounds
from turnstile_server.tasks.catalog import TaskCatalog
from turnstile_server.tasks.model import Task
from turnstile_server.tasks.protocol import FoundTask, Recognition, StoredTask, TaskProblem, TaskSource
from turnstile_server.tasks.task_files import SHIPPED

TASK_SOURCES: Final = Plugins("turnstile.task_sources")

_LOG = logging.getLogger(__name__)

SHOWN_PROBLEMS = 50
KEPT_PROBLEMS = 1000
"""Problems kept in full; further ones are only counted. Every row of a large set may be wrong."""


def load_tasks(sources: Sequence[str | Path], settings: TaskSettings | None = None) -> TaskCatalog:
    """Every task of ``sources``; of none, the shipped ones.

    Raises StartupError for anything that is wrong: its message has a line per problem (file, line, field), its
    detail the same as records.
    """
    return _loaded_tasks(sources, settings or TaskSettings(), lenient=False)


def load_usable_tasks(sources: Sequence[str | Path], settings: TaskSettings) -> TaskCatalog:
    """``load_tasks``, where a folder's tasks are used without those of its tasks that cannot be
    (``TaskProblem.alone``). What is wrong with these is in the catalog's ``left_out``.

    Raises StartupError for any other problem, and for a source of which no task can be used.
    """
    return _loaded_tasks(sources, settings, lenient=True)


def _loaded_tasks(sources: Sequence[str | Path], settings: TaskSettings, *, lenient: bool) -> TaskCatalog:
    tasks: list[Task | StoredTask] = []
    problems: list[TaskProblem] = []
    count = 0
    usable = lenient
    defined: dict[str, FoundTask | StoredTask] = {}
    """The first task found with each id."""
    installed = installed_sources(tell=True)
    for given in map(str, sources or [SHIPPED]):
        kind, source = _chosen(given, installed)
        before = len(tasks)
        for found in _loaded(kind, source, settings):
            if isinstance(found, FoundTask | StoredTask):
                task = found.task if isinstance(found, FoundTask) else found
                first = defined.setdefault(task.id, found)
                if first is found or first.place == found.place:
                    tasks.append(task)
                    continue
                problem = _twice(task.id, found, first.place)
            else:
                problem = found
            usable &= problem.alone
            count += 1
            if count <= KEPT_PROBLEMS:
                problems.append(problem)
        usable &= len(tasks) > before
    if problems and not usable:
        raise _unusable(problems, count)
    cached = settings.bounds_of(TaskBounds).cached_rows
    return TaskCatalog(tasks, cached_tasks=cached, left_out=_lines(problems, count))


def host_paths(sources: Sequence[str]) -> tuple[Path, ...]:
    """Files and folders of this machine that hold the tasks of ``sources``. Raises StartupError."""
    installed = installed_sources()
    chosen = (_chosen(source, installed) for source in sources)
    return tuple(path for kind, source in chosen for path in kind.host_paths(source))


def installed_sources(*, tell: bool = False) -> list[TaskSource]:
    """The installed sources, in the order in which they are asked. ``tell``: the log tells of those left out."""
    found: list[tuple[int, TaskSource]] = []
    for plugin in TASK_SOURCES.declared():
        try:
            source = plugin.create(TaskSource)  # type: ignore[type-abstract]
            found.append((plugin.checked(source.recognition, Recognition), source))
        except BrokenPlugin as error:
            if tell:
                _LOG.warning("%s; no tasks are loaded by it", error)
    return [source for _, source in sorted(found, key=lambda pair: pair[0])]


def _chosen(given: str, installed: Sequence[TaskSource]) -> tuple[TaskSource, str]:
    """The task source of a SOURCE, and what it loads. Raises StartupError for a reference that is broken."""
    name, equals, source = given.partition("=")
    if not (equals and is_reference(name)):
        return next(kind for kind in installed if _recognises(kind, given)), given
    try:
        return TASK_SOURCES.find(name).create(TaskSource), source  # type: ignore[type-abstract]
    except BrokenPlugin as error:
        raise StartupError(f"tasks.sources: {error}") from error


def _loaded(
    kind: TaskSource, source: str, settings: TaskSettings
) -> Iterator[FoundTask | StoredTask | TaskProblem]:
    """What the task source finds; a failure of another package's is one more problem."""
    try:
        yield from kind.load(source, settings)
    except Exception as error:
        if type(kind).__module__.startswith(f"{__package__.partition('.')[0]}."):
            raise
        name = f"{type(kind).__module__}:{type(kind).__qualname__}"
        yield TaskProblem(source, None, None, f"the task source {name} failed: {type(error).__name__}: {error}")


def _recognises(kind: TaskSource, source: str) -> bool:
    try:
        return kind.recognises(source)
    except Exception:  # noqa: BLE001 - other people's code may raise anything, and keeps no other source out
        _LOG.exception("the task source %s cannot tell whether %r is its own", type(kind).__qualname__, source)
        return False


def _twice(task_id: str, found: FoundTask | StoredTask, first: str) -> TaskProblem:
    line, row = found.line, None
    if isinstance(found, StoredTask):
        row = found.row
    elif found.id_line is not None:
        line = found.id_line
    return TaskProblem(found.file, line, "id", f"{task_id!r} is already the id of {first}", row)


def _unusable(problems: Sequence[TaskProblem], count: int) -> StartupError:
    lines = ["The tasks cannot be used.", *_lines(problems, count)]
    return StartupError("\n".join(lines), detail=list(map(_record, problems)))


def _lines(problems: Sequence[TaskProblem], count: int) -> list[str]:
    shown = [str(problem) for problem in problems[:SHOWN_PROBLEMS]]
    return [*shown, f"and {count - SHOWN_PROBLEMS} more"] if count > SHOWN_PROBLEMS else shown


def _record(problem: TaskProblem) -> dict[str, object]:
    found: dict[str, object] = {
        "file": problem.file,
        "line": problem.line,
        "field": problem.field,
        "message": problem.message,
    }
    return found if problem.row is None else {**found, "row": problem.row}
