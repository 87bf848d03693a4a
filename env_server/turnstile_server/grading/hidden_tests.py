"""Grades by hidden tests, in a copy of the task (``judged_copy``), with material that the agent never had.

The hidden tests come last into the copy; they run as another user than the owner of everything before, and what
they run of the work, by the launcher, as a third (``trust: boundary``).

What must hold: hidden tests that cannot run are TaskFailed; work that breaks them scores 0.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Sequence
from posixpath import dirname

import anyio.to_thread

from turnstile_server.errors import FileProblem, TaskFailed
from turnstile_server.grading.apart import run_apart
from turnstile_server.grading.bounds import GradingBounds
from turnstile_server.grading.judged_copy import RESULT_BYTES, CopyJudge, JudgedCopies
from turnstile_server.grading.programs import (
    AS_WORK,
    HIDDEN,
    IMAGE_TESTS,
    INSIDE,
    MODULES,
    PLACE,
    PROGRAMS,
    SHARED,
    private,
    python_of,
)
from turnstile_server.grading.protocol import Component, ComponentGrader, GradingTools, Work
from turnstile_server.grading.repository_tests import RepositoryJudge
from turnstile_server.grading.verdict import (
    CANNOT_RUN,
    DiffVerdict,
    HiddenTestsVerdict,
    blanket,
    read_command,
    read_tests,
)
from turnstile_server.sandboxes.protocol import IMAGE_PYTHON, Command, ExecResult, Sandbox, User
from turnstile_server.tasks.git_history import keep_one_commit
from turnstile_server.tasks.hidden_tests import ANSWER, HiddenTests
from turnstile_server.tasks.model import Task

TESTS = f"{PLACE}/tests"
START = f"{PLACE}/start"
"""The work folder as the task ships it, for the canary of a command."""
_MOST_ANSWER_BYTES = 100_000
"""One argument of a program has 128 KiB."""
_ROUNDS = 3
"""A folder of one user goes when what another has in it is gone."""
_START_STATE = (INSIDE / "start_state.py").read_text()
_NOT_THERE = 3
_IS_THERE = f"import shutil, sys; sys.exit(0 if shutil.which(sys.argv[1]) else {_NOT_THERE})"
_LAUNCHING = (b"AS_WORK", b"turnstile_tests")
"""Names by which a command that judges has a program of the work run."""
OLDEST_PYTHON = (3, 9)
"""That runs the hidden tests' runner (``inside/run_tests.py``)."""
_CAN_TEST = f"import sys; print('%d.%d' % sys.version_info[:2]); sys.exit(sys.version_info < {OLDEST_PYTHON})"
_IS_APART = f"""
import os, sys
parts = (sys.executable, sys.prefix, sys.base_prefix, os.__file__)
sys.exit({_NOT_THERE} if any(os.path.realpath(part).startswith(os.getcwd() + "/") for part in parts) else 0)
"""
"""Program that checks that the Python that judges has none of its parts in the work folder."""
NO_LAUNCHER = (
    "the image cannot run Turnstile's helper (it needs a Python), so the work cannot run apart from its judge: "
    "use another image, or mark the task's tests `trust: in_process`"
)


def folder_of(tests: HiddenTests) -> str:
    """The folder of the hidden tests. Where the work runs apart, only what judges can read it, and nobody can
    guess its name: what judges would follow a link of the work, or read a path that it returns. Where the work
    runs with what judges, neither may change it."""
    return f"{HIDDEN}/{secrets.token_hex(16)}" if tests.trust == "boundary" else TESTS


def _environment(argv: Sequence[str], folder: str) -> dict[str, str]:
    """Environment of a command that judges work that runs apart. Its Python takes modules from the tests' folders,
    not from the work folder, in which it is started (``PYTHONSAFEPATH``; Python 3.11 and newer). Its git runs no
    program that the configuration of the work's repository names: it refuses the folder as another user's, which
    it is not by its uid where all users have one."""
    folders = dict.fromkeys([*(dirname(part) for part in argv if part.startswith(f"{folder}/")), folder, MODULES])
    return {
        "AS_WORK": AS_WORK,
        "GIT_TEST_ASSUME_DIFFERENT_OWNER": "1",
        "PYTHONPATH": ":".join(folders),
        "PYTHONSAFEPATH": "1",
        "TMPDIR": SHARED,
    }


def _placed(tests: HiddenTests, folder: str) -> list[str]:
    """The command, without an answer."""
    return [part.replace("{tests}", folder) for part in tests.command]


def _no_argument(answer: str) -> str | None:
    """Reason why the answer cannot be an argument of a program; None: it can."""
    if "\0" in answer:
        return "it has a NUL character"
    if len(answer.encode()) > _MOST_ANSWER_BYTES:
        return f"it has more than {_MOST_ANSWER_BYTES} bytes"
    return None


class HiddenTestsGrader(ComponentGrader):
    """The component ``tests``: 1 when every expected test passes, else 0."""

    Options = HiddenTests

    def __init__(self, tools: GradingTools, name: str, options: HiddenTests) -> None:
        self._copies = JudgedCopies(tools)
        self._tools = tools

    async def grade(self, task: Task, work: Work) -> Component:
        """See ``ComponentGrader``."""
        assert task.tests is not None  # else the task does not ask for this component
        judge: CopyJudge
        if task.tests.runner == "repository":
            judge = await RepositoryJudge.of(task, task.tests, self._copies, self._tools)
        else:
            judge = hidden = _HiddenTestsJudge(task, task.tests, work.answer, self._copies, self._tools)
            if await hidden.runs_work():
                return await self._copies.judged(task, work, hidden, hidden.take_second)
        return await self._copies.judged(task, work, judge)


class _HiddenTestsJudge:
    """A ``CopyJudge``."""

    component = "tests"
    elsewhere = False

    def __init__(
        self, task: Task, tests: HiddenTests, answer: str | None, copies: JudgedCopies, tools: GradingTools
    ) -> None:
        self._task = task
        self._tests = tests
        # Half a character, which JSON can write, is no argument of a program.
        self._answer = (answer or "").encode(errors="replace").decode()
        self._copies = copies
        self._bounds = tools.settings.bounds_of(GradingBounds)
        self._git_history_timeout_s = tools.tasks.git_history_timeout_s
        self.protected = tests.protected
        self._archive: bytes | None = None
        self._second: Sandbox | None = None
        """Where the work's programs run, apart from the command that judges them."""

    async def runs_work(self) -> bool:
        """A command that may have programs of the work run: it, or a file of the tests, names what does. Raises
        TaskFailed."""
        tests = self._tests
        if tests.runner != "command" or tests.trust != "boundary":
            return False
        text = await self._packed() + "\n".join(tests.command).encode()
        return any(name in text for name in _LAUNCHING)

    def take_second(self, sandbox: Sandbox) -> None:
        """A copy of the same, in which the command does not run."""
        self._second = sandbox

    async def prepare(self, sandbox: Sandbox) -> None:
        if self._tests.runner != "command" and sandbox.python != IMAGE_PYTHON:
            await self._check_python(sandbox)
        if self._tests.runner != "command" or sandbox.python == IMAGE_PYTHON:
            await self._check_apart(sandbox)
        if self._task.git_history == "one_commit":  # else the work could read the solution while it is judged
            await keep_one_commit(sandbox, self._task, self._git_history_timeout_s)
        if self._tests.runner == "command" and not await self._start_state(sandbox, "keep"):
            raise TaskFailed(
                f"The files of task {self._task.id} cannot be copied beside it, which a `runner: command` needs."
            )

    async def _check_apart(self, sandbox: Sandbox) -> None:
        """The image's Python, where it runs what judges, is no part of the work."""
        probe = Command(
            (*IMAGE_TESTS, "-c", _IS_APART),
            user=User.TESTS,
            timeout_s=self._bounds.probe_timeout_s,
        )
        if (await sandbox.exec(probe)).exit_code in (*CANNOT_RUN, _NOT_THERE):
            raise TaskFailed(
                f"The image of task {self._task.id} has no python3 outside of the work folder, which grading by "
                "tests needs: one in the work folder could be replaced by the work."
            )

    async def _check_python(self, sandbox: Sandbox) -> None:
        """Tests in Python run on the image's. Where our own programs do too, a failure of those tells."""
        result = await sandbox.exec(
            Command(
                (*IMAGE_TESTS, "-c", _CAN_TEST),
                user=User.TESTS,
                timeout_s=self._bounds.probe_timeout_s,
            )
        )
        if result.exit_code != 0:
            said = result.stdout.decode(errors="replace").strip()
            found = "none" if result.exit_code in CANNOT_RUN else said or "a broken one"
            raise TaskFailed(
                f"The hidden tests of task {self._task.id} cannot run: `runner: {self._tests.runner}` needs "
                f"python3 in the image, {'.'.join(map(str, OLDEST_PYTHON))} or later, which has {found}; use "
                "another image, or `runner: command`"
            )

    async def judge(self, sandbox: Sandbox, diff: DiffVerdict) -> Component:
        tests = self._tests
        verdict = await self._run(sandbox, tests)
        if verdict.fault is not None:
            raise TaskFailed(f"The hidden tests of task {self._task.id} cannot run: {verdict.fault}")
        detail = {"diff": dict(diff.detail), "tests": {"trust": tests.trust, **verdict.detail}}
        return Component(float(verdict.passed), detail, diff.summary + verdict.summary)

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
        may_repeat = tests.trust == "boundary" and not tests.in_place
        config = {
            "nonce": nonce.hex(),
            "runner": tests.runner,
            "tests": folder,
            "shared": SHARED,
            "work": sandbox.workdir,
            "import_paths": tests.import_paths,
            "expected": tests.expected,
            "trust": tests.trust,
            "in_place": tests.in_place,
            "timeout_s": tests.timeout_s,
            "max_shown": self._bounds.max_shown,
        }
        result = await sandbox.exec(
            Command(
                argv=(*IMAGE_TESTS, f"{PROGRAMS}/inside/start.py", "run_tests"),
                user=User.TESTS,
                launches=User.WORK if tests.trust == "boundary" else None,
                stdin=json.dumps(config).encode(),
                # A second run of the tests has as much time (``run_tests.outcomes_of``).
                timeout_s=(2 if may_repeat else 1) * tests.timeout_s + self._bounds.runner_grace_s,
                max_output_bytes=RESULT_BYTES,
            )
        )
        return read_tests(result, tests.expected, nonce)

    async def _packed(self) -> bytes:
        """The files of the tests. Raises TaskFailed."""
        if self._archive is None:
            self._archive = await anyio.to_thread.run_sync(self._copies.pack, self._tests.files)
        return self._archive

    async def _put_tests(self, sandbox: Sandbox, tests: HiddenTests, folder: str) -> None:
        """Raises FileProblem."""
        archive = await self._packed()
        if tests.trust == "boundary":
            parent, name = HIDDEN.rsplit("/", 1)
            closed = await anyio.to_thread.run_sync(private, archive, f"{name}{folder[len(HIDDEN) :]}")
            await sandbox.upload(closed, parent, user=User.TESTS)
        else:
            await sandbox.upload(archive, TESTS)

    async def _run_command(self, sandbox: Sandbox, tests: HiddenTests, folder: str) -> HiddenTestsVerdict:
        """Its exit status on the work; where it passes, it must not pass what the task ships as its start."""
        if ANSWER in tests.command and (why := _no_argument(self._answer)) is not None:
            return HiddenTestsVerdict(False, detail={"note": f"the answer cannot be checked: {why}"})
        argv = self._argv(tests, folder, self._answer)
        there = await self._is_there(sandbox, argv[0])
        result = await self._judging(sandbox, tests, folder, self._answer)
        if result.exit_code in CANNOT_RUN and not there:
            return HiddenTestsVerdict(False, fault=f"there is no program {argv[0]!r} in the image")
        verdict = read_command(result)
        if not verdict.passed:
            return verdict
        for copy in (sandbox, self._second):
            if copy is not None and not await self._back_to_start(copy):
                return blanket(verdict, "the task's start could not be put back, so the canary did not run")
        # A checker of the answer passes it in any work folder, so the canary is what nobody has answered.
        if read_command(await self._judging(sandbox, tests, folder, "")).passed:
            return blanket(verdict, "the command passes the task's start, too (its canary)")
        return verdict

    def _argv(self, tests: HiddenTests, folder: str, answer: str) -> tuple[str, ...]:
        # After the places of the tests, so that an answer never names their folder.
        return tuple(answer if part == ANSWER else part for part in _placed(tests, folder))

    async def _judging(self, sandbox: Sandbox, tests: HiddenTests, folder: str, answer: str) -> ExecResult:
        argv = self._argv(tests, folder, answer)
        env = _environment(_placed(tests, folder), folder) if tests.trust == "boundary" else {}
        if self._second is not None and sandbox.can_launch:
            roots = (sandbox.workdir, SHARED)
            return await run_apart(sandbox, self._second, argv, env, roots, tests.timeout_s)
        return await sandbox.exec(Command(argv=argv, user=User.TESTS, timeout_s=tests.timeout_s, env=env))

    async def _back_to_start(self, sandbox: Sandbox) -> bool:
        """The work folder is what the task ships as its start."""
        if sandbox is self._second:
            await sandbox.stop_all()
        for _ in range(_ROUNDS):
            for user in (User.WORK, User.TESTS, User.AGENT):  # each has files of its own there
                await self._start_state(sandbox, "empty", user)
            if await self._start_state(sandbox, "back"):
                return True
        return False

    async def _start_state(self, sandbox: Sandbox, action: str, user: User = User.AGENT) -> bool:
        """Run ``start_state.py``; True if it succeeds. Its text is an argument: not every user sees its folder."""
        argv = (*python_of(sandbox), "-c", _START_STATE, action, START)
        command = Command(argv, user=user, timeout_s=self._bounds.diff_timeout_s)
        return (await sandbox.exec(command)).exit_code == 0

    async def _is_there(self, sandbox: Sandbox, program: str) -> bool:
        """True if the program exists. One given by a path in the work folder is part of the work, so it counts as
        there. Ask before anything of the work has run: the work could make the check fail, and with an exit status
        of its choice it would then have no reward."""
        if "/" in program and not program.startswith("/"):
            return True
        probe = Command(
            (*python_of(sandbox), "-c", _IS_THERE, program),
            user=User.TESTS,
            timeout_s=self._bounds.probe_timeout_s,
        )
        return (await sandbox.exec(probe)).exit_code != _NOT_THERE
