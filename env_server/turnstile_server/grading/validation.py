"""Proves a task: its gold solution scores 1, doing nothing does not, and both score the same a second time.

The proof takes the path of an episode: the task's sandbox, files changed in it, the work folder fetched, and
graded like any agent's work. Its findings are for the task's author.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import anyio
import anyio.to_thread

from turnstile.models import Fault
from turnstile_server.errors import FileProblem, TurnstileError
from turnstile_server.grading.own_programs import runs_the_work
from turnstile_server.grading.protocol import Grade, Grader, Work
from turnstile_server.grading.world_validation import ProofParts, played, put_gold
from turnstile_server.sandboxes.protocol import Sandbox
from turnstile_server.tasks.model import Gold, Task
from turnstile_server.tasks.tarball import read_files
from turnstile_server.tasks.workspace import prepare_workspace


class ProofVerdict(StrEnum):
    """Whether a task is sound."""

    PROVEN = "ok"
    NOT_GRADED = "not graded"
    """It asks for no grader: there is nothing to prove, and nothing wrong."""
    WRONG = "failed"
    """The task is wrong."""
    NOT_TRIED = "error"
    """The machine, not the task, prevented the proof."""


@dataclass(frozen=True, slots=True)
class Proof:
    """What was found out about one task."""

    task_id: str
    verdict: ProofVerdict
    problems: tuple[str, ...]
    seconds: float


class Validator:
    """Proves tasks."""

    def __init__(self, grader: Grader, parts: ProofParts) -> None:
        self._grader = grader
        self._parts = parts

    async def prove(self, task: Task) -> Proof:
        """Does not raise for a task that is wrong or sandboxes that fail: that is the proof's verdict."""
        began = time.monotonic()
        try:
            verdict, problems = await self._prove(task)
        except TurnstileError as error:
            infrastructure = error.fault is Fault.INFRASTRUCTURE
            verdict = ProofVerdict.NOT_TRIED if infrastructure else ProofVerdict.WRONG
            problems = [error.message]
        return Proof(task.id, verdict, tuple(problems), time.monotonic() - began)

    async def _prove(self, task: Task) -> tuple[ProofVerdict, list[str]]:
        if task.world is not None:
            return await self._prove_world(task)
        if not task.graded:
            return ProofVerdict.NOT_GRADED, []
        if task.gold is None:
            return ProofVerdict.WRONG, ["it has no gold solution, so nothing shows that it can be solved"]
        empty, gold = await self._works(task, task.gold)
        problems = await self._visible(task)
        for name, work, right in (("the gold solution", gold, True), ("the empty work", empty, False)):
            grades = [await self._grader.grade(task, work) for _ in range(2)]
            problems += _compared(name, grades, right=right)
        return (ProofVerdict.WRONG if problems else ProofVerdict.PROVEN), problems

    async def _prove_world(self, task: Task) -> tuple[ProofVerdict, list[str]]:
        """Like any task, but each grade is of a world of its own, made from the same seed: a world that is not the
        same twice shows itself in two grades that differ."""
        assert task.world is not None
        if not task.graded:
            await played(task, self._parts, solve=False)
            return ProofVerdict.NOT_GRADED, []
        if task.gold is None and not task.world.solvable:
            return ProofVerdict.WRONG, ["its world has no `solve`, so nothing shows that the task can be solved"]
        problems = []
        for name, solve in (("the known solution", True), ("doing nothing", False)):
            grades = []
            for _ in range(2):
                begun, work = await played(task, self._parts, solve=solve)
                grades.append(await self._grader.grade(begun, work))
            problems += _compared(name, grades, right=solve)
        return (ProofVerdict.WRONG if problems else ProofVerdict.PROVEN), problems

    async def _visible(self, task: Task) -> list[str]:
        """What is wrong with the tests' text."""
        if task.tests is None:
            return []
        files = await anyio.to_thread.run_sync(read_files, task.tests.files, self._parts.tasks)
        return runs_the_work(task.tests, files)

    async def _works(self, task: Task, gold: Gold) -> tuple[Work, Work]:
        """The work of an agent that does nothing, and of one that does what the gold solution says."""
        if not task.grades_files:
            return Work(), Work(answer=gold.answer)
        sandbox = await self._parts.provider.create(self._parts.spec_of(task))
        try:
            await prepare_workspace(sandbox, task, self._parts.archive_of)
            empty = await self._fetch(sandbox)
            await put_gold(sandbox, gold, self._parts.archive_of)
            solved = await self._fetch(sandbox)
        except FileProblem as error:
            raise _wrong(task, error) from error
        finally:
            with anyio.CancelScope(shield=True):
                await sandbox.destroy()
        return Work(archive=empty), Work(archive=solved, answer=gold.answer)

    async def _fetch(self, sandbox: Sandbox) -> bytes:
        await sandbox.stop_all()
        return await sandbox.download(sandbox.workdir, self._parts.max_work_bytes)


def _compared(name: str, grades: Sequence[Grade], *, right: bool) -> list[str]:
    """What two grades of the same work show to be wrong. ``right``: whether the work should score 1."""
    first, second = grades
    if (first.reward == 1.0) is not right:
        return [f"{name} scores {first.reward:g}{_why(first) if right else ', too'}"]
    if outcome(first) != outcome(second):
        return [f"{name} scores {first.reward:g}, then {second.reward:g}{_why(second)}"]
    return []


def outcome(grade: Grade) -> tuple[float | None, Mapping[str, float], list[str]]:
    """The part of a grade that must be the same for the same work: reward, components, failed tests."""
    return grade.reward, grade.components, failed_tests(grade)


def failed_tests(grade: Grade) -> list[str]:
    return sorted(one["id"] for one in grade.detail.get("tests", {}).get("failed", ()))


def _why(grade: Grade) -> str:
    """Why a work did not score 1, in full, as the rest of a sentence."""
    tests: Mapping[str, Any] = grade.detail.get("tests", {})
    diff: Mapping[str, Any] = grade.detail.get("diff", {})
    answer: Mapping[str, Any] = grade.detail.get("answer", {})
    reasons = [f"{one['id']} {one['status']}: {one['message']}" for one in tests.get("failed", ())]
    if not reasons and grade.components.get("tests") == 0.0:
        said = tests.get("note") or diff.get("refused") or f"exit status {tests.get('exit_code')}"
        reasons.append(f"{said}. {tests.get('output', '')}".strip())
    if answer and not answer["right"]:
        reasons.append(f"its answer is wrong: {answer['note']}")
    reasons += [line for line in grade.detail.get("summary", ()) if line.startswith("world: ")]
    reasons += [f"{path} is left out: {why}" for path, why in diff.get("left_out", ())]
    return "".join(f"\n  {reason}" for reason in reasons)


def _wrong(task: Task, error: FileProblem) -> TurnstileError:
    return FileProblem(f"The files of task {task.id} cannot be put in place: {error.message}")
