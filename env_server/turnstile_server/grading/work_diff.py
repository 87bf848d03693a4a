"""Changes made by a work, file by file: found in a copy of its task (``judged_copy``), never on the host."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import anyio
import anyio.to_thread

from turnstile.models import FileChange, LeftOut, WorkDiff
from turnstile_server.errors import SandboxDeath, SandboxFailed, TaskFailed
from turnstile_server.grading.bounds import GradingBounds
from turnstile_server.grading.judged_copy import RESULT_BYTES, WORK, JudgedCopies
from turnstile_server.grading.programs import PROGRAMS, python_of
from turnstile_server.grading.protocol import GradingTools
from turnstile_server.grading.verdict import CANNOT_RUN, storable
from turnstile_server.sandboxes.protocol import Command, Sandbox
from turnstile_server.tasks.model import Task
from turnstile_server.tasks.tarball import pack
from turnstile_server.tasks.workspace import not_work_of


class WorkDiffer:
    """Shows works, each in a sandbox of its own."""

    def __init__(self, tools: GradingTools) -> None:
        self._copies = JudgedCopies(tools)
        self._settings = tools.settings
        self._bounds = tools.settings.bounds_of(GradingBounds)
        self._task_settings = tools.tasks

    async def diff(self, episode_id: str, task: Task, archive: bytes, left_out: Iterable[LeftOut]) -> WorkDiff:
        """``archive``: of a ``Work``. ``left_out``: what its grade says of it.

        Raises SandboxUnavailable, SandboxFailed, TaskFailed (its set-up fails, or it has no Python), FileProblem.
        """
        known = {one.path: one.reason for one in left_out}
        with anyio.move_on_after(self._settings.timeout_s):
            async with self._copies.without_work(task) as sandbox:
                shown = await self._shown(sandbox, task, archive)
            return await anyio.to_thread.run_sync(_work_diff, episode_id, shown, known)
        raise SandboxFailed(f"The diff took longer than {self._settings.timeout_s:g} s (grading.timeout_s).")

    async def _shown(self, sandbox: Sandbox, task: Task, archive: bytes) -> str | bytes:
        wrapped = await anyio.to_thread.run_sync(
            lambda: pack(None, self._task_settings, extra={"work.tar": archive})
        )
        await sandbox.upload(wrapped, WORK)
        config = {
            "work": f"{WORK}/work.tar",
            "root": sandbox.workdir,
            "protected": () if task.tests is None else task.tests.protected,
            "not_work": not_work_of(task),
            "max_files": self._bounds.shown_changes,
            "max_file_bytes": self._bounds.max_read_bytes,
            "max_bytes": self._bounds.shown_diff_bytes,
            "seconds": self._bounds.diff_timeout_s / 4,
        }
        result = await sandbox.exec(
            Command(
                argv=(*python_of(sandbox), f"{PROGRAMS}/inside/start.py", "show_changes"),
                cwd="/",
                stdin=json.dumps(config).encode(),
                timeout_s=self._bounds.diff_timeout_s,
                max_output_bytes=RESULT_BYTES,
            )
        )
        if result.exit_code in CANNOT_RUN:
            raise TaskFailed("the image has no python3, which comparing the work needs")
        if result.timed_out:
            return json.dumps({"refused": f"comparing it took longer than {self._bounds.diff_timeout_s:g} s"})
        if result.exit_code != 0:
            said = result.stderr[-500:].decode(errors="replace")
            raise SandboxFailed.of(
                SandboxDeath.OUTSIDE, f"comparing the work ended with {result.exit_code}: {said}"
            )
        return result.stdout


def _work_diff(episode_id: str, shown: str | bytes, known: dict[str, str]) -> WorkDiff:
    """The answer of the program, with what the grade says. Of files its reason counts: it knows what the judge
    protects."""
    found: dict[str, Any] = storable(json.loads(shown))
    known = dict(known)
    files = [{**one, "left_out": known.pop(one["path"], one["left_out"])} for one in found.get("files", ())]
    rest = {**dict(found.get("left_out", ())), **known}
    return WorkDiff(
        episode_id=episode_id,
        files=tuple(map(FileChange.model_validate, files)),
        further=found.get("further", 0),
        left_out=tuple(LeftOut(path=path, reason=reason) for path, reason in rest.items()),
        refused=found.get("refused"),
    )
