"""Task files: the task source of YAML and JSONL files and of folders of them.

A source is a file (``.yaml``, ``.yml``, ``.jsonl``) or a folder. A folder with a ``task.yaml`` is that one task,
and the rest of it is the task's own data; in any other folder the ``*.jsonl`` files are read and the sub-folders
are searched, without hidden ones. Within a folder names are sorted.

What must hold: a ``folder`` that a task names lies below the folder of its task file, and neither it nor anything
in it is a link, so a task file cannot take in other files of this machine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

from pydantic import ValidationError

from turnstile.models.faults import fault_text
from turnstile_server.settings import TaskSettings
from turnstile_server.tasks.files import Files, FilesOptions
from turnstile_server.tasks.grader_options import MAY_NAME_CODE, GradingEntry, field_place
from turnstile_server.tasks.model import Gold, Task
from turnstile_server.tasks.parse import Loc, TaskEntry, TaskSyntaxError, parse_jsonl, parse_yaml
from turnstile_server.tasks.part import GraderOptions
from turnstile_server.tasks.path_options import PathOptions, path_of, problems_of
from turnstile_server.tasks.protocol import FoundTask, Recognition, TaskProblem, alone
from turnstile_server.tasks.tarball import FilesProblem, check_folder

_Solution = TypeVar("_Solution", bound=Gold)

SHIPPED = Path(__file__).parent / "shipped"
"""The tasks that come with Turnstile."""

TASK_FILE = "task.yaml"


class TaskFiles:
    """A ``TaskSource``: a SOURCE is a path, and may have options (``path_options``)."""

    recognition = Recognition.ANYTHING

    def recognises(self, source: str) -> bool:
        return True

    def host_paths(self, source: str) -> Sequence[Path]:
        return (path_of(source),)

    def load(self, source: str, settings: TaskSettings) -> Iterator[FoundTask | TaskProblem]:
        try:
            options = PathOptions.parse(source)
        except ValueError as error:
            yield from problems_of(source, error)
            return
        yield from options.chosen(source, self._load(options.path, settings))

    def _load(self, path: Path, settings: TaskSettings) -> Iterator[FoundTask | TaskProblem]:
        if path.is_dir():
            files = list(find_files(path))
            if not files:
                yield _problem(path, f"no tasks here: no {TASK_FILE} and no .jsonl below this folder{_hint(path)}")
            for file in files:
                yield from alone(_in_folder(file, settings))
        elif path.is_file():
            yield from _read(path, settings)
        else:
            yield _problem(path, "no such file or folder")


def _in_folder(file: Path, settings: TaskSettings) -> Iterator[FoundTask | TaskProblem]:
    if file.is_symlink():
        yield _problem(file, "it is a link; in a folder only files are read")
    else:
        yield from _read(file, settings)


def _hint(folder: Path) -> str:
    """Python in a folder is never run because it lies there; only a file that is named is."""
    found = sorted(path.name for path in folder.glob("*.py"))
    return f". A task that is a Python class is named by its file, like {folder / found[0]}" if found else ""


def _read(path: Path, settings: TaskSettings) -> Iterator[FoundTask | TaskProblem]:
    try:
        size = path.stat().st_size
        if size > settings.max_source_bytes:
            yield _problem(path, f"larger than {settings.max_source_bytes} bytes")
            return
        text = path.read_bytes().decode()
    except UnicodeDecodeError as error:
        yield _problem(path, f"not UTF-8: {error.reason} at byte {error.start}")
        return
    except OSError as error:
        yield _problem(path, error.strerror or str(error))
        return
    for entry in _entries(path, text):
        if isinstance(entry, TaskSyntaxError):
            yield _problem(path, entry.message, entry.line, entry.loc)
        else:
            yield from _checked(path, entry, settings)


def _entries(path: Path, text: str) -> Sequence[TaskEntry | TaskSyntaxError]:
    match path.suffix:
        case ".yaml" | ".yml":
            try:
                return parse_yaml(text)
            except TaskSyntaxError as error:
                return [error]
        case ".jsonl":
            return list(parse_jsonl(text)) or [TaskSyntaxError("the file is empty", 1)]
        case _:
            return [TaskSyntaxError("a task file ends in .yaml, .yml or .jsonl", None)]


def _checked(path: Path, entry: TaskEntry, settings: TaskSettings) -> Iterator[FoundTask | TaskProblem]:
    """The entry's task, or everything that is wrong with it."""
    if not isinstance(entry.value, dict):
        yield _problem(path, "a task is a mapping of its fields", entry.line)
        return
    try:
        task = Task.model_validate(entry.value, context=MAY_NAME_CODE)
    except ValidationError as error:
        for item in error.errors(include_url=False):
            loc = field_place(item["loc"])
            yield _problem(path, fault_text(item), entry.line_of(loc), loc)
        return
    placed, problems = _with_folders(task, path, entry, settings)
    yield from problems
    if not problems:
        yield FoundTask(placed, str(path), entry.line, entry.line_of(("id",)))


def _with_folders(
    task: Task, path: Path, entry: TaskEntry, settings: TaskSettings
) -> tuple[Task, list[TaskProblem]]:
    """The task with its folders absolute, and what is wrong with them."""
    problems: list[TaskProblem] = []

    def placed(files: Files, *loc: str | int) -> Files:
        if files.folder is None:
            return files
        at: Loc = (*loc, "folder")
        try:
            folder = _inside(path.parent, files.folder)
            check_folder(folder, settings)
        except FilesProblem as error:
            problems.append(_problem(path, str(error), entry.line_of(at), at))
            return files
        return files.model_copy(update={"folder": folder})

    def below(folder: Path, name: str, entry: GradingEntry) -> GradingEntry:
        if not isinstance(entry, GraderOptions):
            return entry
        if isinstance(entry, FilesOptions):
            loc = field_place(("grading", name, "files"))
            entry = entry.model_copy(update={"files": placed(entry.files, *loc)})
        return entry.below(folder)

    changes: dict[str, object] = {}
    if task.base is not None:
        changes["base"] = placed(task.base, "base")
    if task.gold is not None:
        changes["gold"] = _placed_gold(task.gold, placed, "gold")
    changes["wrong"] = tuple(_placed_gold(work, placed, "wrong", index) for index, work in enumerate(task.wrong))
    if task.grading:
        folder = path.parent.absolute()
        changes["grading"] = {name: below(folder, name, entry) for name, entry in task.grading.items()}
    if task.tools:
        changes["tools"] = task.tools.below(path.parent.absolute())
    return task.model_copy(update=changes), problems


def _placed_gold(gold: _Solution, placed: Callable[..., Files], *loc: str | int) -> _Solution:
    changes: dict[str, object] = {}
    if gold.files is not None:
        changes["files"] = placed(gold.files, *loc, "files")
    if gold.script is not None:
        files = placed(gold.script.files, *loc, "script", "files")
        changes["script"] = gold.script.model_copy(update={"files": files})
    return gold.model_copy(update=changes)


def _problem(path: Path, message: str, line: int | None = None, loc: Loc = ()) -> TaskProblem:
    return TaskProblem(str(path), line, ".".join(str(part) for part in loc) or None, message)


def find_files(folder: Path) -> Iterator[Path]:
    """The task files of a folder, by the rule at the head of this module. Links are not followed; a ``task.yaml``
    may be one."""
    own = folder / TASK_FILE
    if own.is_file() or own.is_symlink():
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
