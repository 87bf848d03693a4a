"""Task files to tasks: found, read, checked, all that is wrong told at once.

A source is a file (``.yaml``, ``.yml``, ``.jsonl``) or a folder. In a folder, ``task.yaml`` makes it one task and
ends the search there (what lies beside it is the task's own data); otherwise its ``*.jsonl`` files are sources and
its sub-folders are searched, hidden ones not. Sources and folders keep their order, names within one are sorted.

What must hold: a ``folder`` named by a task lies below the folder of its task file, and neither it nor anything in
it is a link, so a task file cannot take in what lies elsewhere on this machine.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import ValidationError

from turnstile_server.errors import NotFound, StartupError
from turnstile_server.settings import TaskSettings
from turnstile_server.tasks.archive import FilesProblem, check_folder
from turnstile_server.tasks.model import Files, Task
from turnstile_server.tasks.protocol import TaskSource
from turnstile_server.tasks.source import Entry, Loc, Problem, SourceError, parse_jsonl, parse_yaml

SHIPPED = Path(__file__).parent / "shipped"
"""The tasks that come with Turnstile."""

TASK_FILE = "task.yaml"
SHOWN_PROBLEMS = 50


class LoadedTasks:
    """Tasks in the order of their sources. A TaskSource."""

    def __init__(self, tasks: Sequence[Task]) -> None:
        self._tasks = {task.id: task for task in tasks}

    def get(self, task_id: str) -> Task:
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


def load_tasks(paths: Sequence[Path], settings: TaskSettings | None = None) -> TaskSource:
    """Every task of ``paths``; of none, the shipped ones.

    Raises StartupError: its message has a line per problem (file, line, field), its detail the same as records.
    """
    loading = _Loading(settings or TaskSettings())
    for path in paths or [SHIPPED]:
        loading.source(path)
    if loading.problems:
        problems = loading.problems
        lines = [str(problem) for problem in problems[:SHOWN_PROBLEMS]]
        if len(problems) > SHOWN_PROBLEMS:
            lines.append(f"and {len(problems) - SHOWN_PROBLEMS} more")
        detail = [
            {"file": one.file, "line": one.line, "field": one.field, "message": one.message} for one in problems
        ]
        raise StartupError("\n".join(["The tasks cannot be used.", *lines]), detail=detail)
    return LoadedTasks(loading.tasks)


@dataclass(slots=True)
class _Loading:
    settings: TaskSettings
    tasks: list[Task] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    places: dict[str, str] = field(default_factory=dict)
    """Where each id was first defined."""

    def source(self, path: Path) -> None:
        if path.is_dir():
            files = list(find_files(path))
            if not files:
                self._problem(path, None, (), f"no tasks here: no {TASK_FILE} and no .jsonl below this folder")
            for file in files:
                self._file(file)
        elif path.is_file():
            self._file(path)
        else:
            self._problem(path, None, (), "no such file or folder")

    def _file(self, path: Path) -> None:
        try:
            size = path.stat().st_size
            if size > self.settings.max_source_bytes:
                self._problem(path, None, (), f"larger than {self.settings.max_source_bytes} bytes")
                return
            text = path.read_bytes().decode()
        except UnicodeDecodeError as error:
            self._problem(path, None, (), f"not UTF-8: {error.reason} at byte {error.start}")
            return
        except OSError as error:
            self._problem(path, None, (), error.strerror or str(error))
            return
        match path.suffix:
            case ".yaml" | ".yml":
                try:
                    entries: Sequence[Entry | SourceError] = parse_yaml(text)
                except SourceError as error:
                    entries = [error]
            case ".jsonl":
                entries = list(parse_jsonl(text)) or [SourceError("the file is empty", 1)]
            case _:
                entries = [SourceError("a task file ends in .yaml, .yml or .jsonl", None)]
        for entry in entries:
            if isinstance(entry, SourceError):
                self._problem(path, entry.line, (), entry.message)
            else:
                self._entry(path, entry)

    def _entry(self, path: Path, entry: Entry) -> None:
        if not isinstance(entry.value, dict):
            self._problem(path, entry.line, (), "a task is a mapping of its fields")
            return
        try:
            task = Task.model_validate(entry.value)
        except ValidationError as error:
            for item in error.errors(include_url=False):
                loc = tuple(part for part in item["loc"] if part != "[key]")
                message = "there is no such field" if item["type"] == "extra_forbidden" else item["msg"]
                self._problem(path, entry.line_of(loc), loc, message.removeprefix("Value error, "))
            return
        placed = self._with_folders(task, path, entry)
        where = f"{path}:{entry.line}"
        first = self.places.setdefault(task.id, where)
        if first != where:
            self._problem(path, entry.line_of(("id",)), ("id",), f"{task.id!r} is already the id of {first}")
        elif placed is not None:
            self.tasks.append(placed)

    def _with_folders(self, task: Task, path: Path, entry: Entry) -> Task | None:
        """The task with its folders absolute; None when one of them cannot be used."""
        changes: dict[str, object] = {}
        sound = True
        parts: tuple[tuple[str, str | None, Files | None], ...] = (
            ("base", None, task.base),
            ("tests", "files", task.tests.files if task.tests else None),
            ("gold", "files", task.gold.files if task.gold else None),
        )
        for name, inner, files in parts:
            if files is None or files.folder is None:
                continue
            loc: Loc = (name, "folder") if inner is None else (name, inner, "folder")
            try:
                folder = _inside(path.parent, files.folder)
                check_folder(folder, self.settings)
            except FilesProblem as error:
                self._problem(path, entry.line_of(loc), loc, str(error))
                sound = False
                continue
            placed = files.model_copy(update={"folder": folder})
            if inner is None:
                changes[name] = placed
            elif name == "tests" and task.tests is not None:
                changes[name] = task.tests.model_copy(update={"files": placed})
            elif task.gold is not None:
                changes[name] = task.gold.model_copy(update={"files": placed})
        return task.model_copy(update=changes) if sound else None

    def _problem(self, path: Path, line: int | None, loc: Loc, message: str) -> None:
        field_name = ".".join(str(part) for part in loc) or None
        self.problems.append(Problem(str(path), line, field_name, message))


def find_files(folder: Path) -> Iterator[Path]:
    """The task files of a folder, by the rule at the head of this module. Links are not followed."""
    own = folder / TASK_FILE
    if own.is_file():
        yield own
        return
    for path in sorted(folder.iterdir()):
        if path.name.startswith(".") or path.is_symlink():
            continue
        if path.is_dir():
            yield from find_files(path)
        elif path.suffix == ".jsonl":
            yield path


def _inside(root: Path, folder: Path) -> Path:
    """``folder`` below ``root``, absolute, a folder and reached through no link. Raises FilesProblem."""
    if folder.is_absolute() or ".." in folder.parts or not folder.parts:
        raise FilesProblem(f"{str(folder)!r} must be relative to the task file and stay in its folder")
    path = root.resolve()
    for part in folder.parts:
        path = path / part
        if path.is_symlink():
            raise FilesProblem(f"{path} is a link")
    if not path.is_dir():
        raise FilesProblem(f"{path} is not a folder")
    return path
