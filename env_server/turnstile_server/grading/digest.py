"""A digest of what judges a task's work: two gradings with one digest were by the same judge.

It covers the task's fields and files that grading reads, and the source of the graders of this server.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

from turnstile_server.errors import TaskFailed
from turnstile_server.tasks.files import Files
from turnstile_server.tasks.model import Task

_GRADERS = Path(__file__).parent
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

    def __init__(self, pack: Callable[[Files], bytes]) -> None:
        self._pack = pack
        code = hashlib.sha256()
        for path in sorted(_GRADERS.rglob("*.py")):
            code.update(path.relative_to(_GRADERS).as_posix().encode() + b"\0" + path.read_bytes())
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
        return digest.hexdigest()

    def _packed(self, files: Files | None) -> bytes:
        if files is None:
            return b"-"
        try:
            return hashlib.sha256(self._pack(files)).digest()
        except TaskFailed:
            return b"?"
