"""Grades tasks of R2E-Gym as its own runtime does, in a copy of the task in which no agent ever was.

The image's script runs the image's hidden tests, linked into the work folder, and the outcomes of its log must be
the expected ones (``r2e_log``). The work runs in the process that writes this log, so a careful forgery passes:
such tasks are ``trust: in_process``. A log that contradicts itself, as that of the untouched task does not, is not
believed.

What must hold: the script and the hidden tests are the image's, and so is the environment that runs them; a run
without a result scores 0 only where the untouched task has one, else there is no reward.
"""

from __future__ import annotations

import secrets
from typing import Any

from turnstile_server.errors import TaskFailed
from turnstile_server.grading.bounds import GradingBounds
from turnstile_server.grading.judged_copy import JudgedCopies
from turnstile_server.grading.protocol import Component, ComponentGrader, GradingTools, Work
from turnstile_server.grading.verdict import DiffVerdict, last_lines, one_line, storable
from turnstile_server.kinds.r2e import test_log
from turnstile_server.kinds.r2e.options import ENVIRONMENT, HIDDEN_TESTS, LINK, OF_THE_IMAGE, SCRIPT, R2eTests
from turnstile_server.sandboxes.protocol import Command, ExecResult, Sandbox
from turnstile_server.tasks.git_history import keep_one_commit
from turnstile_server.tasks.model import Task
from turnstile_server.tasks.repository_run import protected_globs
from turnstile_server.tasks.workspace import remove_tests

_FRAMEWORK = tuple(f"{name}{ending}" for name in ("pytest", "_pytest", "pluggy") for ending in ("", ".*"))
"""``python -m pytest`` looks into the work folder first."""
_TAIL = 4000
_LOOK_S = 60.0
_LOOK = f"""
for file in {SCRIPT} {ENVIRONMENT}; do
  [ -e "$file" ] || {{ echo "its work folder has no $file"; exit 3; }}
done
[ -d {HIDDEN_TESTS} ] || {{ echo "it has no {HIDDEN_TESTS}"; exit 3; }}
exec cat {SCRIPT}
"""
_RUN = f'rm -rf {LINK} && ln -s {HIDDEN_TESTS} {LINK} && exec /bin/bash "$0" 2>&1'


class R2eGrader(ComponentGrader):
    """The component ``r2e``: 1 when all tests and no others report what they must, else 0."""

    Options = R2eTests

    def __init__(self, tools: GradingTools, name: str, options: R2eTests) -> None:
        self._copies = JudgedCopies(tools)
        self._tools = tools
        self._name = name
        self._options = options

    async def grade(self, task: Task, work: Work) -> Component:
        """See ``ComponentGrader``."""
        judge = _R2eJudge(task, self._name, self._options, self._copies, self._tools)
        return await self._copies.judged(task, work, judge)


class _R2eJudge:
    """A ``CopyJudge``."""

    protected = (*protected_globs(OF_THE_IMAGE), *_FRAMEWORK, ".git", "*/.git")
    elsewhere = False

    def __init__(self, task: Task, name: str, tests: R2eTests, copies: JudgedCopies, tools: GradingTools) -> None:
        self.component = name
        self._task = task
        self._tests = tests
        self._copies = copies
        self._tools = tools
        self._bounds = tools.settings.bounds_of(GradingBounds)
        self._script = b""

    async def prepare(self, sandbox: Sandbox) -> None:
        """Takes the script out of the work folder, and what an agent did not find there."""
        self.elsewhere = False  # of the attempt before
        await self._clear(sandbox)

    async def _clear(self, sandbox: Sandbox) -> None:
        look = await sandbox.exec(Command(("/bin/sh", "-c", _LOOK), timeout_s=_LOOK_S))
        if look.exit_code != 0:
            said = one_line((look.stdout + look.stderr).decode(errors="replace"))
            raise TaskFailed(f"The image of task {self._task.id} is none of R2E-Gym: {said}")
        self._script = look.stdout
        await remove_tests(sandbox, self._task)
        if self._task.git_history == "one_commit":  # else the work could read the solution while it is judged
            await keep_one_commit(sandbox, self._task, self._tools.tasks.git_history_timeout_s)

    async def judge(self, sandbox: Sandbox, diff: DiffVerdict) -> Component:
        result = await self._run(sandbox)
        log = _log(result)
        detail: dict[str, Any] = {"trust": "in_process", "exit_code": result.exit_code, "output": log[-_TAIL:]}
        if result.timed_out:
            return self._none(diff, detail, f"the tests ran longer than {self._tests.timeout_s:g} s")
        found = test_log.outcomes(log)
        if not found:
            await self._untouched()
            return self._none(diff, detail, "there is no result in the log, but one in that of the untouched task")
        unequal = test_log.differences(found, self._tests.expected)
        failed = [
            {
                "id": test,
                "status": (got or "missing").lower(),
                "message": f"{(wanted or 'nothing').lower()} wanted",
            }
            for test, (got, wanted) in unequal.items()
        ]
        expected = len(self._tests.expected)
        matching = expected - sum(wanted is not None for _, wanted in unequal.values())
        detail |= {
            "expected": expected,
            "passed": matching,
            "failed": failed[: self._bounds.max_shown],
        }
        if not failed and (doubts := test_log.doubts(log)):
            own = test_log.doubts(await self._untouched())
            new = [sentence for kind, sentence in doubts.items() if kind not in own]
            if new:
                return self._none(diff, detail, f"tampered: {'; '.join(new)}")
        lines = tuple(one_line(f"{one['id']} {one['status']}: {one['message']}") for one in detail["failed"])
        return Component(float(not failed), self._found(diff, detail), diff.summary + lines)

    async def _run(self, sandbox: Sandbox) -> ExecResult:
        """Both streams as one, in the order in which they were written, as R2E-Gym has them. As the owner of the
        work folder, which its tests may write to."""
        path = f"/tmp/turnstile-r2e-{secrets.token_hex(8)}/{SCRIPT}"
        await sandbox.write(path, self._script)
        return await sandbox.exec(
            Command(
                ("/bin/sh", "-c", _RUN, path),
                timeout_s=self._tests.timeout_s,
                max_output_bytes=self._bounds.max_log_bytes,
            )
        )

    async def _untouched(self) -> str:
        """The log of the task as it begins. Raises TaskFailed where that has no result, either."""
        self.elsewhere = True
        async with self._copies.without_work(self._task) as clean:
            await self._clear(clean)
            result = await self._run(clean)
        self.elsewhere = False
        log = _log(result)
        if result.timed_out or not test_log.outcomes(log):
            why = "it runs out of time" if result.timed_out else f"its last lines: {last_lines(log)}"
            raise TaskFailed(
                f"The tests of task {self._task.id} cannot run, whatever the work: there is no summary of pytest "
                f"in their log (exit status {result.exit_code}); {why}"
            )
        return log

    def _none(self, diff: DiffVerdict, detail: dict[str, Any], note: str) -> Component:
        summary = (*diff.summary, one_line(f"{self.component}: {note}"))
        return Component(0.0, self._found(diff, {**detail, "note": note}), summary, spoiled=True)

    def _found(self, diff: DiffVerdict, detail: dict[str, Any]) -> dict[str, Any]:
        return {"diff": dict(diff.detail), self.component: storable(detail)}


def _log(result: ExecResult) -> str:
    return test_log.plain(result.stdout.decode(errors="replace"))
