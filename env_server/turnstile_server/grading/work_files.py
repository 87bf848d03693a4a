"""Files of a work, read for a grader in a copy of the task (``judged_copy``), never from the archive on the
host."""

from __future__ import annotations

import base64
import difflib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from turnstile_server.errors import SandboxDeath, SandboxFailed, TaskFailed
from turnstile_server.grading.bounds import GradingBounds
from turnstile_server.grading.judged_copy import RESULT_BYTES, JudgedCopies
from turnstile_server.grading.programs import PROGRAMS, python_of
from turnstile_server.grading.protocol import Component, GradingTools, Work
from turnstile_server.grading.verdict import CANNOT_RUN, DiffVerdict
from turnstile_server.sandboxes.protocol import Command, Sandbox
from turnstile_server.tasks.model import Task


@dataclass(frozen=True, slots=True)
class WorkFile:
    """One file of a work, or of the task's start."""

    data: bytes | None
    missing: str = ""
    """Reason why there is none: a sentence's end."""

    @property
    def text(self) -> str:
        """Its text, or that there is none."""
        return f"(no file: {self.missing})" if self.data is None else self.data.decode(errors="replace")


@dataclass(frozen=True, slots=True)
class WorkFiles:
    """The files that a grader asked for."""

    work: Mapping[str, WorkFile]
    start: Mapping[str, WorkFile]
    """Before the agent; empty where nobody asked."""
    spoiled: Component | None = None
    """The work could not be taken over: its component, and there are no files."""

    def diff(self, path: str) -> str:
        """The changes of the work in the file, as a unified diff."""
        before, after = self.start[path], self.work[path]
        if after.data is None:
            return after.text if before.data is None else f"(deleted: {after.missing})"
        lines = ["" if before.data is None else before.text, after.text]
        old, new = (text.splitlines() for text in lines)
        found = "\n".join(difflib.unified_diff(old, new, f"before/{path}", f"after/{path}", lineterm=""))
        return found or "(unchanged)"


class WorkReader:
    """Reads files of works, ``max_bytes`` of each at most."""

    def __init__(self, tools: GradingTools) -> None:
        self._copies = JudgedCopies(tools)
        self._max_bytes = tools.settings.bounds_of(GradingBounds).max_read_bytes
        self._timeout_s = tools.settings.bounds_of(GradingBounds).diff_timeout_s

    async def read(
        self, task: Task, work: Work, paths: Sequence[str], component: str, *, start: bool = False
    ) -> WorkFiles:
        """``component``: the name under which a work that cannot be taken over is told. ``start``: the files as
        the task ships them, too. Raises as ``Grader.grade`` does."""
        if not paths:
            return WorkFiles({}, {})
        judge = _FileReader(component, paths, self._max_bytes, self._timeout_s, start=start)
        found = await self._copies.judged(task, work, judge)
        if judge.work is None:
            return WorkFiles({}, {}, found)
        return WorkFiles(judge.work, judge.start)


class _FileReader:
    """A ``CopyJudge`` that judges nothing."""

    protected = ()
    elsewhere = False

    def __init__(
        self, component: str, paths: Sequence[str], max_bytes: int, timeout_s: float, *, start: bool
    ) -> None:
        self.component = component
        self.start: Mapping[str, WorkFile] = {}
        self.work: Mapping[str, WorkFile] | None = None
        self._paths = paths
        self._max_bytes = max_bytes
        self._timeout_s = timeout_s
        self._wants_start = start

    async def prepare(self, sandbox: Sandbox) -> None:
        if self._wants_start:
            self.start = await self._read(sandbox)

    async def judge(self, sandbox: Sandbox, diff: DiffVerdict) -> Component:
        self.work = await self._read(sandbox)
        return Component(1.0)

    async def _read(self, sandbox: Sandbox) -> dict[str, WorkFile]:
        found: dict[str, WorkFile] = {}
        for path in self._paths:  # one at a time, for the bound of what one command may print
            config = {"root": sandbox.workdir, "paths": [path], "max_bytes": self._max_bytes}
            command = Command(
                argv=(*python_of(sandbox), f"{PROGRAMS}/inside/show_files.py"),
                cwd="/",
                stdin=json.dumps(config).encode(),
                timeout_s=self._timeout_s,
                max_output_bytes=RESULT_BYTES,
            )
            result = await sandbox.exec(command)
            if result.exit_code in CANNOT_RUN:
                raise TaskFailed("the image has no python3, which reading files of the work needs")
            if result.exit_code != 0 or result.timed_out:
                said = result.stderr[-500:].decode(errors="replace")
                # Nothing of the work runs here, so this is none of its doing.
                why = f"reading {path} of the work ended with {result.exit_code}: {said}"
                raise SandboxFailed.of(SandboxDeath.OUTSIDE, why)
            told = json.loads(result.stdout)[path]
            data = told.get("data")
            found[path] = WorkFile(None if data is None else base64.b64decode(data), told.get("missing", ""))
        return found
