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

from turnstile_server.errors import TaskFailed
from turnstile_server.integrations.package_process import PROGRAMS
from turnstile_server.settings import GradingSettings
from turnstile_server.tasks.code_options import CodeOptions
from turnstile_server.tasks.files import Files
from turnstile_server.tasks.grader_options import GRADERS
from turnstile_server.tasks.judge_options import JudgeOptions
from turnstile_server.tasks.model import Task
from turnstile_server.tasks.package_options import PackageOptions
from turnstile_server.tasks.part import GraderOptions

_SOURCES = (Path(__file__).parent, PROGRAMS)
_OF_THE_JUDGE = {"url", "model", "temperature", "max_tokens", "json_mode", "extra_body", "max_text_chars"}
"""Settings of a judge that its verdict may depend on."""
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
            for path in sorted(folder.rglob("*.py")):
                code.update(path.relative_to(folder).as_posix().encode() + b"\0" + path.read_bytes())
        self._code = code.digest()

    def of(self, task: Task) -> str:
        """Reads the task's files, so call it in a thread. A task whose files cannot be packed has a digest too:
        that of its fields."""
        digest = hashlib.sha256(self._code)
        fields = task.model_dump(mode="json", exclude=_NOT_GRADED_BY)
        digest.update(json.dumps(fields, sort_keys=True).encode())
        judges = (None if judge is None else judge.files for judge in (task.tests, task.script))
        for files in (task.base, *judges):
            digest.update(self._packed(files))
        for name in task.grading:
            digest.update(self._by_settings(task.grading[name]))
        return digest.hexdigest()

    def _by_settings(self, entry: object) -> bytes:
        """Of what an entry of ``grading`` names, and its fields do not hold."""
        match entry:
            case CodeOptions():
                target = entry.host_code or self._settings.functions.get(entry.target, "")
                return target.encode() + _contents(target.rpartition(":")[0])
            case PackageOptions():
                return _contents(entry.name.rpartition(":")[0] or entry.name)
            case JudgeOptions() if entry.judge in self._settings.judges:
                judge = self._settings.judges[entry.judge].model_dump(mode="json", include=_OF_THE_JUDGE)
                return json.dumps(judge, sort_keys=True).encode()
            case GraderOptions() if not (plugin := GRADERS.find(entry.grader)).ours:
                return str(plugin).encode() + _contents(plugin.target.partition(":")[0])
        return b"-"

    def _packed(self, files: Files | None) -> bytes:
        if files is None:
            return b"-"
        try:
            return hashlib.sha256(self._pack(files)).digest()
        except TaskFailed:
            return b"?"


def _contents(place: str) -> bytes:
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
