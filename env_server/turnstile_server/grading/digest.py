"""A digest of what judges a task's work: two gradings with one digest were by the same judge.

It covers the task's fields and files that grading reads, the files of grading code that it or the settings name,
the settings of its judges, the source of the graders of this server, with its programs for packages, and the
module and version of a grader of another package. Not covered is what such code imports.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from importlib.machinery import PathFinder
from pathlib import Path

from turnstile.plugins import Plugin
from turnstile_server.errors import TaskFailed
from turnstile_server.settings import GradingSettings
from turnstile_server.tasks.files import Files, FilesOptions
from turnstile_server.tasks.grader_options import GRADERS, GradingEntry
from turnstile_server.tasks.model import Task
from turnstile_server.tasks.part import GraderOptions

_SOURCES = (Path(__file__).parent, Path(__file__).parents[1] / "integrations" / "programs")
_NOT_GRADED_BY = {
    "base",
    "difficulty",
    "gold",
    "id",
    "instruction",
    "limits",
    "metadata",
    "tags",
    "tools",
    "wrong",
}
"""Fields of a task that no grading reads. ``base`` comes as a tar: an edited file of a folder counts, too."""


class GraderDigests:
    """``pack`` gives a task's files as a tar; it raises TaskFailed."""

    def __init__(self, pack: Callable[[Files], bytes], settings: GradingSettings) -> None:
        self._pack = pack
        self._settings = settings
        code = hashlib.sha256()
        for folder in _SOURCES:
            code.update(_sources_in(folder))
        self._code = code.digest()
        self._by_grader: dict[str, bytes] = {}

    def of(self, task: Task) -> str:
        """Reads the task's files, so call it in a thread. A task whose files cannot be packed has a digest too:
        that of its fields."""
        digest = hashlib.sha256(self._code)
        fields = task.model_dump(mode="json", exclude=_NOT_GRADED_BY)
        digest.update(json.dumps(fields, sort_keys=True).encode())
        judges = (entry.files for entry in task.options if isinstance(entry, FilesOptions))
        for files in (task.base, *judges):
            digest.update(self._packed(files))
        for entry in task.grading.values():
            digest.update(self._of_entry(entry))
        return digest.hexdigest()

    def _of_entry(self, entry: GradingEntry) -> bytes:
        """Bytes that stand for the code of the entry's grader, and for what the entry names."""
        if not isinstance(entry, GraderOptions):
            return b"-"
        plugin = GRADERS.find(entry.grader)
        if not plugin.ours:
            return _code_of(plugin) + entry.judged_by(self._settings)
        if plugin.name not in self._by_grader:
            self._by_grader[plugin.name] = _code_of(plugin)
        return self._by_grader[plugin.name] + entry.judged_by(self._settings)

    def _packed(self, files: Files | None) -> bytes:
        if files is None:
            return b"-"
        try:
            return hashlib.sha256(self._pack(files)).digest()
        except TaskFailed:
            return b"?"


def _sources_in(folder: Path) -> bytes:
    """The SHA-256 of all Python files below ``folder``."""
    code = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        code.update(path.relative_to(folder).as_posix().encode() + b"\0" + path.read_bytes())
    return code.digest()


def _code_of(plugin: Plugin) -> bytes:
    """Bytes that stand for a grader's code: its folder where it is ours, else its module and package version."""
    module = plugin.target.partition(":")[0]
    if plugin.ours and (file := _file_of(module)) is not None:
        return _sources_in(file.parent)
    return str(plugin).encode() + contents_of_code(module)


def contents_of_code(place: str) -> bytes:
    """The SHA-256 of a file of code, by its path or as a module, which is found without importing anything."""
    try:
        file = Path(place) if place.endswith(".py") else _file_of(place)
        return b"?" if file is None else hashlib.sha256(file.read_bytes()).digest()
    except (OSError, ValueError):  # a name that can be none
        return b"?"


def _file_of(module: str) -> Path | None:
    folders: list[str] | None = None
    found = None
    parts = module.split(".")
    for end in range(1, len(parts) + 1):
        found = PathFinder.find_spec(".".join(parts[:end]), folders)
        if found is None:
            return None
        folders = found.submodule_search_locations
    return Path(found.origin) if found is not None and found.origin is not None else None
