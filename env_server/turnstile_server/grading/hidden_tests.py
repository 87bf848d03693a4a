"""Grades by hidden tests, in a sandbox of its own, with material that the agent never had.

The order, in a sandbox in which no agent ever was: the clean task and its set-up; the agent's archive beside it;
the diff applied by our own program; the archive removed; the hidden tests, last; the tests run as another user
than the owner of everything before.

What must hold: the archive is never opened on the host; every sandbox made here is destroyed, also on
cancellation; only infrastructure failures are tried again; work that cannot be taken over, or breaks the tests,
scores 0; hidden tests that cannot run are TaskFailed; nothing else becomes a score.
"""

from __future__ import annotations

import json
import secrets
from pathlib import Path

import anyio
import anyio.to_thread

from turnstile_server.errors import FileProblem, SandboxFailed, SandboxUnavailable, TaskFailed
from turnstile_server.grading.protocol import Component, GradingTools, Work
from turnstile_server.grading.verdict import (
    CANNOT_RUN,
    DiffVerdict,
    HiddenTestsVerdict,
    read_command,
    read_diff,
    read_tests,
)
from turnstile_server.sandboxes.protocol import Command, Sandbox, User
from turnstile_server.tasks.model import Files, HiddenTests, Task
from turnstile_server.tasks.tarball import pack
from turnstile_server.tasks.workspace import prepare_workspace

INSIDE = Path(__file__).parent / "inside"
"""The programs that run in the grading sandbox."""
PLACE = "/tmp/turnstile-grading"
PROGRAMS = f"{PLACE}/programs"
WORK = f"{PLACE}/work"
TESTS = f"{PLACE}/tests"
PYTHON = ("python3", "-I", "-S", "-B")
RESULT_BYTES = 16 << 20
RUNNER_GRACE_S = 30.0
"""The runner ends its tests in time by itself; it gets this much more to start and to report."""
PROBE_S = 30.0


class HiddenTestsGrader:
    """The component ``tests``: 1 when every expected test passes, else 0."""

    def __init__(self, tools: GradingTools) -> None:
        self._provider = tools.sandboxes
        self._spec_of = tools.spec_of
        self._settings = tools.settings
        self._task_settings = tools.tasks
        self._places = anyio.Semaphore(tools.settings.parallel)

    async def grade(self, task: Task, work: Work) -> Component:
        """See ``ComponentGrader``."""
        if task.tests is None or work.archive is None:
            note = "no work was handed in"
            return Component(0.0, {"tests": {"note": note}}, (f"tests: {note}",))
        async with self._places:
            with anyio.move_on_after(self._settings.timeout_s):
                for _ in range(self._settings.attempts - 1):
                    try:
                        return await self._attempt(task, task.tests, work.archive)
                    except (SandboxFailed, SandboxUnavailable):
                        continue
                return await self._attempt(task, task.tests, work.archive)
        raise SandboxFailed(f"Grading took longer than {self._settings.timeout_s:g} s (grading.timeout_s).")

    async def _attempt(self, task: Task, tests: HiddenTests, archive: bytes) -> Component:
        if self._provider is None:
            raise SandboxUnavailable(
                "This task is graded by tests, and this server has no sandboxes to run them in."
            )
        sandbox = await self._provider.create(self._spec_of(task))
        try:
            await self._prepare(sandbox, task)
            diff = await self._apply_diff(sandbox, tests, archive)
            if not diff.applied:
                return Component(0.0, {"diff": dict(diff.detail)}, diff.summary)
            verdict = await self._run(sandbox, tests)
            if verdict.fault is not None:
                raise TaskFailed(f"The hidden tests of task {task.id} cannot run: {verdict.fault}")
            detail = {"diff": dict(diff.detail), "tests": dict(verdict.detail)}
            return Component(float(verdict.passed), detail, diff.summary + verdict.summary)
        finally:
            with anyio.CancelScope(shield=True):
                await sandbox.destroy()

    async def _prepare(self, sandbox: Sandbox, task: Task) -> None:
        try:
            await prepare_workspace(sandbox, task, self._pack)
            # Processes that the set-up left running could change files during the diff.
            await sandbox.stop_all()
            programs = Files(inline={path.name: path.read_text() for path in INSIDE.glob("*.py")})
            await sandbox.upload(self._pack(programs), PROGRAMS)
        except FileProblem as error:
            raise TaskFailed(f"The files of task {task.id} cannot be unpacked: {error.message}") from None

    async def _apply_diff(self, sandbox: Sandbox, tests: HiddenTests, archive: bytes) -> DiffVerdict:
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

    async def _run(self, sandbox: Sandbox, tests: HiddenTests) -> HiddenTestsVerdict:
        try:
            await sandbox.upload(await anyio.to_thread.run_sync(self._pack, tests.files), TESTS)
        except FileProblem as error:
            return HiddenTestsVerdict(False, fault=f"their files cannot be unpacked: {error.message}")
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

    async def _run_command(self, sandbox: Sandbox, tests: HiddenTests) -> HiddenTestsVerdict:
        argv = tuple(part.replace("{tests}", TESTS) for part in tests.command)
        result = await sandbox.exec(Command(argv=argv, user=User.TESTS, timeout_s=tests.timeout_s))
        if result.exit_code in CANNOT_RUN and not await self._runs(sandbox, argv[0]):
            return HiddenTestsVerdict(False, fault=f"there is no program {argv[0]!r} in the image")
        return read_command(result)

    async def _runs(self, sandbox: Sandbox, program: str) -> bool:
        """Whether the program exists. One given by a path in the work folder is part of the work, so it counts as
        there."""
        if "/" in program and not program.startswith("/"):
            return True
        probe = Command(("/bin/sh", "-c", 'command -v -- "$1"', "sh", program), user=User.TESTS, timeout_s=PROBE_S)
        return (await sandbox.exec(probe)).exit_code == 0

    def _pack(self, files: Files) -> bytes:
        try:
            return pack(files, self._task_settings)
        except ValueError as error:
            raise TaskFailed(f"The task's files cannot be used: {error}") from None
