"""Judges a work by the test-suite of its repository (``tests.runner: repository``), a ``CopyJudge``.

The suite is that of the task: what belongs to it, and what acts on its run, is left out of the work's changes
(``tasks/repository_run.py``), and the files of ``tests.files`` are laid over the work folder after the diff.

What must hold: the interpreter is asked before the work is there; the suite runs as the user ``tests``; only a
line keyed with this run's nonce is read.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterable
from typing import Self

import anyio.to_thread

from turnstile_server.errors import FileProblem, TaskFailed
from turnstile_server.grading.bounds import GradingBounds
from turnstile_server.grading.inside.run_tests import FAULTY, opened
from turnstile_server.grading.judged_copy import RESULT_BYTES, JudgedCopies
from turnstile_server.grading.programs import PROGRAMS, python_of
from turnstile_server.grading.protocol import Component, GradingTools
from turnstile_server.grading.verdict import CANNOT_RUN, MAX_TEXT, DiffVerdict, HiddenTestsVerdict, storable
from turnstile_server.sandboxes.protocol import Command, ExecResult, Sandbox, User
from turnstile_server.tasks.git_history import keep_one_commit
from turnstile_server.tasks.hidden_tests import HiddenTests
from turnstile_server.tasks.model import Task
from turnstile_server.tasks.repository_run import file_of, owned_by_tests, protected_globs
from turnstile_server.tasks.tarball import read_files

_NEEDS = (3, 9)
_PROBE = """
import json, os, sys
import pytest
places = (sys.executable, sys.prefix, sys.base_prefix)
print(json.dumps({"version": sys.version_info[:2], "places": [os.path.realpath(place) for place in places]}))
"""


class RepositoryJudge:
    """A ``CopyJudge``."""

    component = "tests"
    elsewhere = False

    def __init__(
        self, task: Task, tests: HiddenTests, hidden: Iterable[str], copies: JudgedCopies, tools: GradingTools
    ) -> None:
        """``hidden``: paths of the hidden files."""
        self._task = task
        self._tests = tests
        self._run = tests.repository
        self._copies = copies
        self._bounds = tools.settings.bounds_of(GradingBounds)
        self._tools = tools
        named = (file_of(test) for test in (*tests.expected, *self._run.keep))
        self._owned = owned_by_tests([*named, *hidden])
        self.protected = (*tests.protected, *protected_globs(self._owned))

    @classmethod
    async def of(cls, task: Task, tests: HiddenTests, copies: JudgedCopies, tools: GradingTools) -> Self:
        """Raises TaskFailed."""
        try:
            hidden = await anyio.to_thread.run_sync(read_files, tests.files, tools.tasks)
        except ValueError as error:
            raise TaskFailed(f"The files of task {task.id} cannot be used: {error}") from None
        return cls(task, tests, hidden, copies, tools)

    async def prepare(self, sandbox: Sandbox) -> None:
        if self._task.git_history == "one_commit":  # else the work could read the solution while it is judged
            await keep_one_commit(sandbox, self._task, self._tools.tasks.git_history_timeout_s)
        argv = (self._run.python, "-I", "-B", "-c", _PROBE)
        result = await sandbox.exec(
            Command(argv, cwd="/", user=User.TESTS, timeout_s=self._bounds.probe_timeout_s)
        )
        if result.exit_code in CANNOT_RUN:
            raise self._fault(
                f"there is no interpreter {self._run.python!r} in the image (tests.repository.python)"
            )
        if result.exit_code != 0:
            tail = result.stderr[-MAX_TEXT:].decode(errors="replace").strip().splitlines()
            raise self._fault(f"{self._run.python} cannot import pytest: {tail[-1] if tail else 'no message'}")
        said = json.loads(result.stdout)
        if tuple(said["version"]) < _NEEDS:
            found = ".".join(map(str, said["version"]))
            raise self._fault(f"{self._run.python} is Python {found}; 3.9 or later is needed")
        if any(f"{place}/".startswith(f"{sandbox.workdir}/") for place in said["places"]):
            raise self._fault(f"{self._run.python} lies in the work folder, so the work could replace it")

    async def judge(self, sandbox: Sandbox, diff: DiffVerdict) -> Component:
        verdict = await self._verdict(sandbox)
        if verdict.fault is not None:
            raise self._fault(verdict.fault)
        detail = {"diff": dict(diff.detail), "tests": {"trust": self._tests.trust, **verdict.detail}}
        return Component(float(verdict.passed), detail, diff.summary + verdict.summary)

    async def _verdict(self, sandbox: Sandbox) -> HiddenTestsVerdict:
        tests = self._tests
        try:
            await sandbox.upload(await anyio.to_thread.run_sync(self._copies.pack, tests.files), sandbox.workdir)
        except FileProblem as error:
            return HiddenTestsVerdict(False, detail={"note": f"the suite's files have no place: {error.message}"})
        nonce = secrets.token_bytes(32)
        config = {
            "nonce": nonce.hex(),
            "python": self._run.python,
            "work": sandbox.workdir,
            "owned": self._owned,
            "import_paths": tests.import_paths,
            "expected": tests.expected,
            "keep": self._run.keep,
            "cut_ids": self._run.cut_ids,
            "processes": self._run.processes,
            "options": self._run.options,
            "env": self._run.env,
            "timeout_s": tests.timeout_s,
            "max_shown": self._bounds.max_shown,
        }
        result = await sandbox.exec(
            Command(
                argv=(*python_of(sandbox), f"{PROGRAMS}/inside/start.py", "repository"),
                user=User.TESTS,
                stdin=json.dumps(config).encode(),
                timeout_s=tests.timeout_s + self._bounds.runner_grace_s,
                max_output_bytes=RESULT_BYTES,
            )
        )
        return read_suite(result, (*tests.expected, *self._run.keep), nonce)

    def _fault(self, sentence: str) -> TaskFailed:
        return TaskFailed(f"The suite of task {self._task.id} cannot run: {sentence}")


def read_suite(result: ExecResult, wanted: tuple[str, ...], nonce: bytes) -> HiddenTestsVerdict:
    """The verdict from the answer of ``inside/repository.py``."""
    detail: dict[str, object] = {"expected": len(wanted), "exit_code": result.exit_code}
    if result.timed_out:
        return HiddenTestsVerdict(False, detail={**detail, "passed": 0, "note": "the tests ran out of time"})
    try:
        said = storable(opened(nonce, result.stdout.rstrip(b"\n")))
    except ValueError:
        note = "the runner ended without a result"
        return HiddenTestsVerdict(False, detail={**detail, "passed": 0, "note": note})
    if said["faults"] and result.exit_code == FAULTY:
        return HiddenTestsVerdict(False, fault="; ".join(said["faults"])[:MAX_TEXT])
    passed = not said["failed"] and result.exit_code == 0 and set(said["passed"]) == set(wanted)
    failed = [{"id": test, "status": status, "message": told.strip()} for test, status, told in said["failed"]]
    detail.update(passed=len(said["passed"]), failed=failed, output=said["output"][-MAX_TEXT:])
    detail.update(ran=said["ran"], seconds=said["seconds"])
    return HiddenTestsVerdict(passed, detail=detail)
