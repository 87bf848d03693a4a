"""Harbor's task folders as a task source: one, or a folder of them at any depth up to ``MAX_DEPTH``.

A folder with a ``task.toml`` is a task. Folders of Terminal-Bench 1 (``task.yaml`` beside ``run-tests.sh``) and
Harbor's lists of tasks elsewhere are recognised too, so that the message says what to do with them.
"""

from __future__ import annotations

import logging
import os
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from turnstile_server.kinds.harbor.folder import CONFIG, TaskFolder
from turnstile_server.settings import TaskSettings
from turnstile_server.tasks.path_options import PathOptions, path_of, problems_of
from turnstile_server.tasks.protocol import FoundTask, Recognition, TaskProblem, alone
from turnstile_server.tasks.task_files import TASK_FILE

_LOG = logging.getLogger(__name__)

MAX_DEPTH = 4
DATASET, REGISTRY = "dataset.toml", "registry.json"
_OLD = "run-tests.sh"
"""In a task of Terminal-Bench 1."""
_CONVERT = "a task of Terminal-Bench 1; convert it with Harbor (`harbor tasks migrate`), then name the new folder"


class HarborFolders:
    """A ``TaskSource``: a SOURCE is a path, and may have options (``path_options``)."""

    recognition = Recognition.FORM

    def recognises(self, source: str) -> bool:
        path = path_of(source)
        if path.name == REGISTRY:
            return path.is_file()
        return path.is_dir() and next(_task_folders(path), None) is not None

    def host_paths(self, source: str) -> Sequence[Path]:
        return (path_of(source),)

    def load(self, source: str, settings: TaskSettings) -> Iterator[FoundTask | TaskProblem]:
        try:
            options = PathOptions.parse(source)
        except ValueError as error:
            yield from problems_of(source, error)
            return
        wish: set[str] = set()
        offline: list[str] = []
        for each in options.chosen(source, self._load(options.path, source, settings, wish)):
            if isinstance(each, FoundTask) and each.task.id in wish:
                offline.append(each.task.id)
            yield each
        if offline:
            _LOG.warning("these tasks ask for a network and are played without one: %s", ", ".join(offline))

    def _load(
        self, path: Path, source: str, settings: TaskSettings, wish: set[str]
    ) -> Iterator[FoundTask | TaskProblem]:
        """``wish``: gets the names of the tasks that say that they want a network."""
        if path.name == REGISTRY:
            yield TaskProblem(source, None, None, "these tasks are elsewhere; `harbor download` fetches them")
            return
        seen: set[str] = set()
        for folder in _task_folders(path):
            seen.add(folder.name)
            found = _read(folder, settings, wish)
            yield from found if folder == path else alone(found)
        yield from _other_kinds(path)
        if (path / DATASET).is_file():
            yield from _not_here(path / DATASET, seen)


def _read(folder: Path, settings: TaskSettings, wish: set[str]) -> Iterator[FoundTask | TaskProblem]:
    file = folder / CONFIG
    if not file.is_file():
        yield TaskProblem(str(folder / TASK_FILE), None, None, _CONVERT)
        return
    reader = TaskFolder(folder, settings)
    task = reader.read()
    yield from reader.found.problems
    unsupported = reader.found.unsupported
    if not settings.skip_unsupported:
        yield from unsupported
    elif unsupported and not reader.found.problems:
        reasons = "; ".join(str(each) for each in unsupported)
        _LOG.warning("the task %s is left out (tasks.skip_unsupported): %s", folder.name, reasons)
    if task is not None and reader.asks_for_network:
        wish.add(task.id)
    if task is not None:
        yield FoundTask(task, str(file))


def _task_folders(path: Path, depth: int = 0) -> Iterator[Path]:
    """Sorted by name, one folder read at a time."""
    if (path / CONFIG).is_file() or ((path / _OLD).is_file() and (path / TASK_FILE).is_file()):
        yield path
        return
    if depth == MAX_DEPTH:
        return
    try:
        with os.scandir(path) as entries:
            names = sorted(each.name for each in entries if each.is_dir(follow_symlinks=False))
    except OSError:
        return
    for name in names:
        if not name.startswith("."):
            yield from _task_folders(path / name, depth + 1)


def _other_kinds(path: Path) -> Iterator[TaskProblem]:
    """Tasks of Turnstile's own format beside those of Harbor's would be left out without a word."""
    own = [
        each for each in (*path.glob("*.jsonl"), *path.glob(f"*/{TASK_FILE}")) if not (each.parent / _OLD).exists()
    ]
    for each in sorted(own):
        yield TaskProblem(
            str(each), None, None, "the folder holds Harbor's tasks; name this file as a source of its own"
        )


def _not_here(file: Path, seen: set[str]) -> Iterator[TaskProblem]:
    """Tasks that ``dataset.toml`` names and whose folders are missing."""
    try:
        listed: Any = tomllib.loads(file.read_text(encoding="utf-8")).get("tasks", [])
        names = [str(each["name"]) for each in listed]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        yield TaskProblem(str(file), None, "tasks", f"it cannot be read: {error}")
        return
    for index, name in enumerate(names):
        if name.rpartition("/")[2] not in seen:
            message = f"the folder of {name} is not here; `harbor download` fetches it"
            yield TaskProblem(str(file), None, f"tasks.{index}.name", message)
