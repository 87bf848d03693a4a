"""Grades by hidden tests, in a sandbox of its own, with material that the agent never had.

The order, in a sandbox in which no agent ever was: the clean task and its set-up; the agent's archive beside it;
the diff applied by our own program; the archive removed; the hidden tests, last; the tests run as another user
than the owner of everything before, and what they run of the work, by the launcher, as a third (``trust:
boundary``).

What must hold: the archive is never opened on the host; every sandbox made here is destroyed, also on
cancellation; only deaths of sandboxes are tried again; work that cannot be taken over, breaks the tests, or ends
every sandbox in which it is graded (where nothing shows that the machine did) scores 0; hidden tests that cannot
run are TaskFailed; nothing else becomes a score.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from posixpath import dirname

import anyio
import anyio.to_thread

from turnstile_server.errors import FileProblem, SandboxDeath, SandboxFailed, SandboxUnavailable, TaskFailed
from turnstile_server.grading.programs import (
    AS_WORK,
    HIDDEN,
    INSIDE,
    MODULES,
    PLACE,
    PROGRAMS,
    PYTHON,
    SHARED,
    pack_programs,
    private,
)
from turnstile_server.grading.protocol import Component, GradingTools, Work
from turnstile_server.grading.verdict import (
    CANNOT_RUN,
    DiffVerdict,
    HiddenTestsVerdict,
    blanket,
    read_command,
    read_diff,
    read_tests,
)
from turnstile_server.sandboxes.protocol import Command, Sandbox, User
from turnstile_server.tasks.model import Files, HiddenTests, Task
from turnstile_server.tasks.tarball import pack
from turnstile_server.tasks.workspace import prepare_workspace

WORK = f"{PLACE}/work"
TESTS = f"{PLACE}/tests"
START = f"{PLACE}/start"
"""The work folder as the task ships it, for the canary of a command."""
_ROUNDS = 3
"""A folder of one user goes when what another has in it is gone."""
_START_STATE = (INSIDE / "start_state.py").read_text()
_NOT_THERE = 3
_IS_THERE = f"import shutil, sys; sys.exit(0 if shutil.which(sys.argv[1]) else {_NOT_THERE})"
RESULT_BYTES = 16 << 20
RUNNER_GRACE_S = 30.0
"""The runner ends its tests in time by itself; it gets this much more to start and to report."""
PROBE_S = 30.0
NO_LAUNCHER = (
    "the image cannot run Turnstile's helper (it needs a Python), so the work cannot run apart from its judge: "
    "use another image, or mark the task's tests `trust: in_process`"
)


def folder_of(tests: HiddenTests) -> str:
    """Where the hidden tests lie. Where the work runs apart, in a folder that only what judges can read, under a
    name that nobody can guess: what judges would follow a link of the work, or read a path that it returns. Where
    it runs with what judges, in one that neither may change."""
    return f"{HIDDEN}/{secrets.token_hex(16)}" if tests.trust == "boundary" else TESTS


def _environment(argv: Sequence[str], folder: str) -> dict[str, str]:
    """Of a command that judges work that runs apart. Its Python takes modules from the tests' folders, not from
    the work folder, in which it is started (``PYTHONSAFEPATH``; Python 3.11 and newer)."""
    folders = dict.fromkeys([*(dirname(part) for part in argv if part.startswith(f"{folder}/")), folder, MODULES])
    return {"AS_WORK": AS_WORK, "PYTHONPATH": ":".join(folders), "PYTHONSAFEPATH": "1", "TMPDIR": SHARED}


@dataclass(slots=True)
class _Attempt:
    """What is known of one attempt at a grading."""

    with_work: bool = False
    """The work had come into the sandbox, so what happened from then on may be its doing."""
    error: SandboxFailed | SandboxUnavailable | None = None

    @property
    def lost(self) -> bool:
        """Something outside ended it, as far as its sandbox shows."""
        return not isinstance(self.error, SandboxFailed) or self.error.death is SandboxDeath.OUTSIDE


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
        attempts: list[_Attempt] = []
        async with self._places:
            with anyio.move_on_after(self._settings.timeout_s):
                for _ in range(self._settings.attempts):
                    attempts.append(_Attempt())
                    try:
                        return await self._attempt(task, task.tests, work.archive, attempts[-1])
                    except (SandboxFailed, SandboxUnavailable) as error:
                        attempts[-1].error = error
        if attempts[-1].error is None:
            attempts[-1].error = SandboxFailed(
                f"Grading took longer than {self._settings.timeout_s:g} s (grading.timeout_s)."
            )
        # One that never had the work says nothing of it: the work could end the one before at such a time that no
        # other can begin.
        latest = next((one for one in reversed(attempts) if one.with_work), attempts[-1])
        assert latest.error is not None
        if not latest.with_work or latest.lost:
            raise latest.error
        note = f"the work ended its own grading: {latest.error.message}"
        return Component(0.0, {"tests": {"note": note}}, (f"tests: {note}",))

    async def _attempt(self, task: Task, tests: HiddenTests, archive: bytes, attempt: _Attempt) -> Component:
        if self._provider is None:
            raise SandboxUnavailable(
                "This task is graded by tests, and this server has no sandboxes to run them in."
            )
        sandbox = await self._provider.create(self._spec_of(task))
        try:
            await self._prepare(sandbox, task, tests)
            attempt.with_work = True
            diff = await self._apply_diff(sandbox, tests, archive)
            if not diff.applied:
                return Component(0.0, {"diff": dict(diff.detail)}, diff.summary)
            verdict = await self._run(sandbox, tests)
            if verdict.fault is not None:
                raise TaskFailed(f"The hidden tests of task {task.id} cannot run: {verdict.fault}")
            detail = {"diff": dict(diff.detail), "tests": {"trust": tests.trust, **verdict.detail}}
            return Component(float(verdict.passed), detail, diff.summary + verdict.summary)
        finally:
            with anyio.CancelScope(shield=True):
                await sandbox.destroy()

    async def _prepare(self, sandbox: Sandbox, task: Task, tests: HiddenTests) -> None:
        try:
            await prepare_workspace(sandbox, task, self._pack)
            # Processes that the set-up left running could change files during the diff.
            await sandbox.stop_all()
            await sandbox.upload(await anyio.to_thread.run_sync(pack_programs), PROGRAMS)
            if tests.runner == "command" and not await self._start_state(sandbox, "keep"):
                raise TaskFailed(
                    f"The files of task {task.id} cannot be copied beside it, which a `runner: command` needs."
                )
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
            "shared": SHARED,
            "protected": tests.protected,
            "max_changed": self._settings.max_changed_files,
            "max_shown": self._settings.max_shown,
        }
        diff = read_diff(
            await sandbox.exec(
                Command(
                    argv=(*PYTHON, f"{PROGRAMS}/inside/workdiff.py"),
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
        folder = folder_of(tests)
        try:
            await self._put_tests(sandbox, tests, folder)
        except FileProblem as error:
            await self._start_state(sandbox, "empty")
            if tests.runner == "command":  # of which there is a copy: does the task fit without the work?
                await self._start_state(sandbox, "back")
            try:
                await self._put_tests(sandbox, tests, folder)
            except FileProblem:
                return HiddenTestsVerdict(False, fault=f"their files cannot be unpacked: {error.message}")
            return HiddenTestsVerdict(False, detail={"note": f"the work leaves them no room: {error.message}"})
        if tests.runner == "command":
            return await self._run_command(sandbox, tests, folder)
        if tests.trust == "boundary" and not sandbox.can_launch:
            return HiddenTestsVerdict(False, fault=NO_LAUNCHER)
        nonce = secrets.token_bytes(32)
        config = {
            "nonce": nonce.hex(),
            "runner": tests.runner,
            "tests": folder,
            "shared": SHARED,
            "work": sandbox.workdir,
            "import_paths": tests.import_paths,
            "expected": tests.expected,
            "trust": tests.trust,
            "timeout_s": tests.timeout_s,
            "max_shown": self._settings.max_shown,
        }
        result = await sandbox.exec(
            Command(
                argv=(*PYTHON, f"{PROGRAMS}/inside/start.py", "run_tests"),
                user=User.TESTS,
                launches=User.WORK if tests.trust == "boundary" else None,
                stdin=json.dumps(config).encode(),
                timeout_s=tests.timeout_s + RUNNER_GRACE_S,
                max_output_bytes=RESULT_BYTES,
            )
        )
        return read_tests(result, tests.expected, nonce)

    async def _put_tests(self, sandbox: Sandbox, tests: HiddenTests, folder: str) -> None:
        """Raises FileProblem."""
        archive = await anyio.to_thread.run_sync(self._pack, tests.files)
        if tests.trust == "boundary":
            parent, name = HIDDEN.rsplit("/", 1)
            closed = await anyio.to_thread.run_sync(private, archive, f"{name}{folder[len(HIDDEN) :]}")
            await sandbox.upload(closed, parent, user=User.TESTS)
        else:
            await sandbox.upload(archive, TESTS)

    async def _run_command(self, sandbox: Sandbox, tests: HiddenTests, folder: str) -> HiddenTestsVerdict:
        """Its exit status on the work; where it passes, it must not pass what the task ships as its start."""
        argv = tuple(part.replace("{tests}", folder) for part in tests.command)
        apart = tests.trust == "boundary"
        command = Command(
            argv=argv,
            user=User.TESTS,
            timeout_s=tests.timeout_s,
            env=_environment(argv, folder) if apart else {},
            launches=User.WORK if apart else None,
        )
        there = await self._is_there(sandbox, argv[0])
        result = await sandbox.exec(command)
        if result.exit_code in CANNOT_RUN and not there:
            return HiddenTestsVerdict(False, fault=f"there is no program {argv[0]!r} in the image")
        verdict = read_command(result)
        if not verdict.passed:
            return verdict
        for _ in range(_ROUNDS):
            for user in (User.WORK, User.TESTS, User.AGENT):  # each has files of its own there
                await self._start_state(sandbox, "empty", user)
            if await self._start_state(sandbox, "back"):
                break
        else:
            return blanket(verdict, "the task's start could not be put back, so the canary did not run")
        if read_command(await sandbox.exec(command)).passed:
            return blanket(verdict, "the command passes the task's start, too (its canary)")
        return verdict

    async def _start_state(self, sandbox: Sandbox, action: str, user: User = User.AGENT) -> bool:
        """Whether it was done. The program is an argument: not every user sees the folder of the programs."""
        argv = (*PYTHON, "-c", _START_STATE, action, START)
        command = Command(argv, user=user, timeout_s=self._settings.diff_timeout_s)
        return (await sandbox.exec(command)).exit_code == 0

    async def _is_there(self, sandbox: Sandbox, program: str) -> bool:
        """Whether the program exists. One given by a path in the work folder is part of the work, so it counts as
        there. To be asked before anything of the work has run, which could make the asking fail, and then have no
        reward for an exit status of its choice."""
        if "/" in program and not program.startswith("/"):
            return True
        probe = Command((*PYTHON, "-c", _IS_THERE, program), user=User.TESTS, timeout_s=PROBE_S)
        return (await sandbox.exec(probe)).exit_code != _NOT_THERE

    def _pack(self, files: Files) -> bytes:
        try:
            return pack(files, self._task_settings)
        except ValueError as error:
            raise TaskFailed(f"The task's files cannot be used: {error}") from None
