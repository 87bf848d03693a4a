"""Grades SWE-bench rows as the package ``swebench`` does, in a copy of the task in which no agent ever was.

The row's script puts the test files back to the base, applies the test patch and runs the tests; ``swebench``
reads the log, in a process of its own. The work runs in the processes that write this log, so a careful forgery
passes: such tasks are ``trust: in_process``. A log that contradicts itself is not believed.

What must hold: a run without a result scores 0 only where the same script gives one for the untouched task; else
there is no reward. The work's changes below ``.git`` are not taken over: the script needs the base's history.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Mapping
from typing import Any

from turnstile_server.errors import FileProblem, TaskFailed
from turnstile_server.grading.bounds import GradingBounds
from turnstile_server.grading.errors import GraderStalled
from turnstile_server.grading.judged_copy import JudgedCopies
from turnstile_server.grading.protocol import Component, ComponentGrader, GradingTools, Work
from turnstile_server.grading.verdict import DiffVerdict, last_lines, one_line, storable
from turnstile_server.integrations.package_process import PackageError
from turnstile_server.kinds.swe.options import SWEBENCH, SweTests
from turnstile_server.kinds.swe.runner_log import RunnerLog
from turnstile_server.sandboxes.protocol import Command, ExecResult, Sandbox, User
from turnstile_server.tasks.model import Task

_TAIL = 4000


class SweGrader(ComponentGrader):
    """The component ``swe``: 1 when the work resolves the instance in full, else 0."""

    Options = SweTests

    def __init__(self, tools: GradingTools, name: str, options: SweTests) -> None:
        self._copies = JudgedCopies(tools)
        self._tools = tools
        self._name = name
        self._options = options

    async def grade(self, task: Task, work: Work) -> Component:
        """See ``ComponentGrader``."""
        judge = _SweJudge(task, self._name, self._options, self._copies, self._tools)
        return await self._copies.judged(task, work, judge)


class _SweJudge:
    """A ``CopyJudge``."""

    protected = (".git", "*/.git")
    elsewhere = False

    def __init__(
        self,
        task: Task,
        name: str,
        swe: SweTests,
        copies: JudgedCopies,
        tools: GradingTools,
    ) -> None:
        self.component = name
        self._task = task
        self._swe = swe
        self._copies = copies
        self._packages = tools.packages
        self._bounds = tools.settings.bounds_of(GradingBounds)
        self._row = _row_of(task, swe)

    async def prepare(self, sandbox: Sandbox) -> None:
        """The script comes after the work."""
        self.elsewhere = False  # of the attempt before

    async def judge(self, sandbox: Sandbox, diff: DiffVerdict) -> Component:
        script = str((await self._ask({"do": "script"}))["script"])
        result = await self._run(sandbox, script)
        log = RunnerLog(result)
        detail: dict[str, Any] = {"trust": "in_process", "exit_code": log.exit_code, "output": log.text[-_TAIL:]}
        if result.timed_out:
            return self._none(diff, detail, f"the tests ran longer than {self._swe.timeout_s:g} s")
        try:
            report = await self._report(result)
        except (TaskFailed, GraderStalled) as error:
            # A parser that fails, or is lost in the work's log: the control tells whose fault that is.
            report = {"graded": False, "infra_failure": one_line(error.message)}
        if not report["graded"]:
            return self._none(diff, detail, await self._ungraded(script, report))
        failed = [
            {"id": test, "status": status.lower(), "message": group} for test, group, status in report["failed"]
        ]
        expected = len(self._swe.fail_to_pass) + len(self._swe.pass_to_pass)
        detail |= {"expected": expected, "passed": expected - len(failed)}
        detail |= {
            "failed": failed[: self._bounds.max_shown],
            "resolved": report["resolved"],
        }
        if report["doubts"]:
            return self._none(diff, detail, f"tampered: {'; '.join(report['doubts'])}")
        lines = tuple(
            one_line(f"{one['id']} {one['status']}: {one['message']}") for one in failed[: self._bounds.max_shown]
        )
        return Component(float(report["resolved"]), self._found(diff, detail), diff.summary + lines)

    async def _run(self, sandbox: Sandbox, script: str) -> ExecResult:
        """Both streams as one, in the order in which they were written, as the package has them."""
        path = f"/tmp/turnstile-swe-{secrets.token_hex(8)}/eval.sh"
        try:
            await sandbox.write(path, script.encode(), user=User.TESTS)
        except FileProblem as error:
            raise TaskFailed(f"The script of task {self._task.id} cannot be written: {error.message}") from None
        return await sandbox.exec(
            Command(
                argv=("/bin/sh", "-c", 'exec /bin/bash "$0" 2>&1', path),
                env={"GIT_CONFIG_COUNT": "1", "GIT_CONFIG_KEY_0": "safe.directory", "GIT_CONFIG_VALUE_0": "*"},
                user=User.TESTS,
                timeout_s=self._swe.timeout_s,
                max_output_bytes=self._bounds.max_log_bytes,
            )
        )

    async def _report(self, result: ExecResult) -> dict[str, Any]:
        log = result.stdout.decode(errors="replace")
        return await self._ask({"do": "report", "log": log}, timeout_s=self._bounds.log_timeout_s)

    async def _ask(self, fields: Mapping[str, Any], *, timeout_s: float = math.inf) -> dict[str, Any]:
        """Raises TaskFailed for what swebench cannot judge, GraderUnavailable, GraderStalled."""
        self.elsewhere = True  # also where it is ended there
        try:
            answer, _ = await self._packages.ask(SWEBENCH, {"row": self._row, **fields}, timeout_s=timeout_s)
        except PackageError as error:
            raise TaskFailed(f"swebench cannot judge the row of task {self._task.id}: {error}") from error
        self.elsewhere = False
        return answer

    async def _ungraded(self, script: str, report: dict[str, Any]) -> str:
        """Reason why the work prevented its own grading. Raises TaskFailed if the task itself cannot be judged:
        its script does not run on what the task ships, either."""
        self.elsewhere = True

        async def judge(clean: Sandbox) -> None:
            control = await self._run(clean, script)
            if control.timed_out or not (await self._report(control))["graded"]:
                log = RunnerLog(control)
                why = "it runs out of time" if control.timed_out else f"its last lines: {last_lines(log.text)}"
                raise TaskFailed(
                    f"The tests of task {self._task.id} cannot run, whatever the work: swebench's "
                    f"{self._swe.log_parser} finds no result in their log (exit status {log.exit_code}); {why}"
                )

        await self._copies.judge_untouched(self._task, judge)
        kind = f" ({report['infra_failure']})" if report["infra_failure"] else ""
        return f"swebench finds no result in the log{kind}, but one in that of the untouched task"

    def _none(self, diff: DiffVerdict, detail: dict[str, Any], note: str) -> Component:
        summary = (*diff.summary, one_line(f"{self.component}: {note}"))
        return Component(0.0, self._found(diff, {**detail, "note": note}), summary, spoiled=True)

    def _found(self, diff: DiffVerdict, detail: dict[str, Any]) -> dict[str, Any]:
        return {"diff": dict(diff.detail), self.component: storable(detail)}


def _row_of(task: Task, swe: SweTests) -> dict[str, Any]:
    """The row in the package's own format."""
    return {
        "instance_id": swe.instance_id,
        "image": task.image or "",
        "repo": swe.repo,
        "version": swe.version,
        "FAIL_TO_PASS": list(swe.fail_to_pass),
        "PASS_TO_PASS": list(swe.pass_to_pass),
        "log_parser": swe.log_parser,
        "eval_type": swe.eval_type,
        "eval_script": swe.eval_script,
    }
