"""Judges work in a sandbox of its own, with tests that the agent never had.

The order, in a sandbox in which no agent ever was: the clean task and its set-up; the agent's archive beside it;
the diff applied by our own program; the archive removed; the hidden tests, last; the tests run as another user
than the owner of everything before. Reward is the product of the components (each 0 or 1), so all of them must
be had.

What must hold: the archive is never opened on the host; every sandbox made here is destroyed, also on
cancellation; only infrastructure failures are tried again; work that cannot be taken over, or breaks the tests,
is reward 0; hidden tests that cannot run are TaskFailed; nothing else becomes a reward.
"""

from __future__ import annotations

import json
import math
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread

from turnstile_server.errors import FileProblem, SandboxFailed, SandboxUnavailable, TaskFailed
from turnstile_server.grading.answers import judge_answer
from turnstile_server.grading.protocol import Grade, Work
from turnstile_server.grading.verdict import (
    CANNOT_RUN,
    DiffVerdict,
    TestsVerdict,
    read_command,
    read_diff,
    read_tests,
)
from turnstile_server.sandboxes.protocol import Command, Sandbox, SandboxProvider, SandboxSpec, User
from turnstile_server.settings import GradingSettings, TaskSettings
from turnstile_server.tasks.archive import pack
from turnstile_server.tasks.model import Files, HiddenTests, Task
from turnstile_server.tasks.workspace import prepare_workspace

INSIDE = Path(__file__).parent / "inside"
PLACE = "/tmp/turnstile-grading"
PROGRAMS = f"{PLACE}/programs"
WORK = f"{PLACE}/work"
TESTS = f"{PLACE}/tests"
PYTHON = ("python3", "-I", "-S", "-B")
RESULT_BYTES = 16 << 20
RUNNER_GRACE_S = 30.0
"""The runner ends its tests in time by itself; it gets this much more to start and to say so."""
PROBE_S = 30.0


@dataclass(frozen=True, slots=True)
class _Judged:
    passed: bool
    detail: dict[str, Any]


class TaskGrader:
    """``spec_of`` says which sandbox a task is graded in. ``provider`` None: this server has no sandboxes."""

    def __init__(
        self,
        provider: SandboxProvider | None,
        spec_of: Callable[[Task], SandboxSpec],
        settings: GradingSettings,
        task_settings: TaskSettings,
    ) -> None:
        self._provider = provider
        self._spec_of = spec_of
        self._settings = settings
        self._task_settings = task_settings
        self._places = anyio.Semaphore(settings.parallel)

    async def grade(self, task: Task, work: Work) -> Grade:
        """See ``Grader``."""
        components: dict[str, float] = {}
        detail: dict[str, Any] = {}
        if task.answer is not None:
            verdict = await judge_answer(task.answer, work.answer, self._settings.regex_timeout_s)
            components["answer"] = float(verdict.right)
            detail["answer"] = {"right": verdict.right, "note": verdict.note}
        if task.tests is not None:
            outcome_of_exit = await self._judge(task, task.tests, work)
            components["tests"] = float(outcome_of_exit.passed)
            detail.update(outcome_of_exit.detail)
        reward = math.prod(components.values()) if components else None
        return Grade(reward, components, detail)

    async def _judge(self, task: Task, tests: HiddenTests, work: Work) -> _Judged:
        if work.archive is None:
            return _Judged(False, {"tests": {"note": "no work was handed in"}})
        async with self._places:
            with anyio.move_on_after(self._settings.timeout_s):
                for _ in range(self._settings.attempts - 1):
                    try:
                        return await self._attempt(task, tests, work.archive)
                    except (SandboxFailed, SandboxUnavailable):
                        continue
                return await self._attempt(task, tests, work.archive)
        raise SandboxFailed(f"Grading took longer than {self._settings.timeout_s:g} s (grading.timeout_s).")

    async def _attempt(self, task: Task, tests: HiddenTests, archive: bytes) -> _Judged:
        if self._provider is None:
            raise SandboxUnavailable(
                "This task is graded by tests, and this server has no sandboxes to run them in."
            )
        sandbox = await self._provider.create(self._spec_of(task))
        try:
            await self._furnish(sandbox, task)
            diff = await self._take_over(sandbox, tests, archive)
            if not diff.applied:
                return _Judged(False, {"diff": dict(diff.detail)})
            verdict = await self._run(sandbox, tests)
            if verdict.fault is not None:
                raise TaskFailed(f"The hidden tests of task {task.id} cannot run: {verdict.fault}")
            return _Judged(verdict.passed, {"diff": dict(diff.detail), "tests": dict(verdict.detail)})
        finally:
            with anyio.CancelScope(shield=True):
                await sandbox.destroy()

    async def _furnish(self, sandbox: Sandbox, task: Task) -> None:
        try:
            await prepare_workspace(sandbox, task, self._pack)
            # What the set-up left running could get in the way of the diff.
            await sandbox.stop_all()
            programs = Files(inline={path.name: path.read_text() for path in INSIDE.glob("*.py")})
            await sandbox.upload(self._pack(programs), PROGRAMS)
        except FileProblem as error:
            raise TaskFailed(f"The files of task {task.id} cannot be unpacked: {error.message}") from None

    async def _take_over(self, sandbox: Sandbox, tests: HiddenTests, archive: bytes) -> DiffVerdict:
        wrapped = await anyio.to_thread.run_sync(
            lambda: pack(None, self._task_settings, extra={"work.tar": archive})
        )
        try:
            await sandbox.upload(wrapped, WORK)
        except FileProblem as error:
            return DiffVerdict(False, detail={"refused": f"the work cannot be taken over: {error.message}"})
        config = {
            "work": f"{WORK}/work.tar",
            "root": sandbox.workdir,
            "protected": tests.protected,
            "max_changed": self._settings.max_changed_files,
            "max_shown": self._settings.max_shown,
        }
        diff = read_diff(
            await sandbox.exec(
                Command(
                    argv=(*PYTHON, f"{PROGRAMS}/workdiff.py"),
                    cwd="/",
                    stdin=json.dumps(config).encode(),
                    timeout_s=self._settings.diff_timeout_s,
                    max_output_bytes=RESULT_BYTES,
                )
            )
        )
        if diff.fault is not None:
            raise TaskFailed(diff.fault)
        if diff.broken is not None:
            raise SandboxFailed(diff.broken)
        return diff

    async def _run(self, sandbox: Sandbox, tests: HiddenTests) -> TestsVerdict:
        try:
            await sandbox.upload(await anyio.to_thread.run_sync(self._pack, tests.files), TESTS)
        except FileProblem as error:
            return TestsVerdict(False, fault=f"their files cannot be unpacked: {error.message}")
        if tests.runner == "command":
            return await self._run_command(sandbox, tests)
        nonce = secrets.token_bytes(32)
        config = {
            "nonce": nonce.hex(),
            "runner": tests.runner,
            "tests": TESTS,
            "work": sandbox.workdir,
            "import_paths": tests.import_paths,
            "expected": tests.expected,
            "timeout_s": tests.timeout_s,
            "max_shown": self._settings.max_shown,
        }
        result = await sandbox.exec(
            Command(
                argv=(*PYTHON, f"{PROGRAMS}/run_tests.py"),
                user=User.TESTS,
                stdin=json.dumps(config).encode(),
                timeout_s=tests.timeout_s + RUNNER_GRACE_S,
                max_output_bytes=RESULT_BYTES,
            )
        )
        return read_tests(result, tests.expected, nonce)

    async def _run_command(self, sandbox: Sandbox, tests: HiddenTests) -> TestsVerdict:
        argv = tuple(part.replace("{tests}", TESTS) for part in tests.command)
        result = await sandbox.exec(Command(argv=argv, user=User.TESTS, timeout_s=tests.timeout_s))
        if result.exit_code in CANNOT_RUN and not await self._runs(sandbox, argv[0]):
            return TestsVerdict(False, fault=f"there is no program {argv[0]!r} in the image")
        return read_command(result)

    async def _runs(self, sandbox: Sandbox, program: str) -> bool:
        """Whether the program is there; one given by a path in the work folder is the work's own matter."""
        if "/" in program and not program.startswith("/"):
            return True
        probe = Command(("/bin/sh", "-c", 'command -v -- "$1"', "sh", program), user=User.TESTS, timeout_s=PROBE_S)
        return (await sandbox.exec(probe)).exit_code == 0

    def _pack(self, files: Files) -> bytes:
        try:
            return pack(files, self._task_settings)
        except ValueError as error:
            raise TaskFailed(f"The task's files cannot be used: {error}") from None
