"""Proves a task: its gold solution scores 1, doing nothing does not, works known to be wrong score what they must,
all of it the same every time, and nothing that an agent can read holds the solution.

The proof takes the path of an episode: the task's sandbox, files changed in it, the work folder fetched, and
graded like any agent's work. Its findings are for the task's author.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import anyio
import anyio.to_thread

from turnstile.models import Fault
from turnstile_server.errors import FileProblem, TurnstileError
from turnstile_server.grading.leaks import LeakReport, find_leaks, patch_texts, secret_texts
from turnstile_server.grading.own_programs import runs_the_work
from turnstile_server.grading.proof_works import ProofParts, play_environment, put_gold
from turnstile_server.grading.protocol import Grade, Grader, Work
from turnstile_server.grading.steps_validation import played_steps
from turnstile_server.grading.verdict import last_lines
from turnstile_server.sandboxes.protocol import ImageFacts, Sandbox, SandboxProvider
from turnstile_server.tasks.environment import TaskEnvironment
from turnstile_server.tasks.files import Files
from turnstile_server.tasks.images import TaskImages
from turnstile_server.tasks.model import Gold, Task
from turnstile_server.tasks.tarball import read_files
from turnstile_server.tasks.workspace import fetch_work, prepare_for_agent

GOLD, NOTHING = "gold", "nothing"


class ProofVerdict(StrEnum):
    """Verdict on a task: sound or not."""

    PROVEN = "ok"
    NOT_GRADED = "not graded"
    """It asks for no grader: there is nothing to prove, and nothing wrong."""
    WRONG = "failed"
    """The task is wrong."""
    NOT_TRIED = "error"
    """The machine, not the task, prevented the proof."""


@dataclass(frozen=True, slots=True)
class WorkRuns:
    """One work, graded several times."""

    work: str
    """``gold``, ``nothing``, or the name of a wrong work."""
    rewards: tuple[float | None, ...]
    seconds: tuple[float, ...]
    """Seconds of each grading."""
    flaky: Mapping[str, int] = field(default_factory=dict)
    """Tests that failed in some of the runs: in how many."""


@dataclass(frozen=True, slots=True)
class Proof:
    """Findings about one task."""

    task_id: str
    verdict: ProofVerdict
    problems: tuple[str, ...]
    seconds: float
    works: tuple[WorkRuns, ...] = ()
    image: ImageFacts | None = None
    """None where sandboxes have none."""
    trust: str | None = None
    """``Task.trust`` of the task."""
    leak_note: str | None = None
    """Reason why leaks were not looked for, or not everywhere."""


class Validator:
    """Proves tasks. ``runs``: how often each work is graded, at least twice. ``images``: None where no task has
    one."""

    def __init__(self, grader: Grader, parts: ProofParts, runs: int = 2, images: TaskImages | None = None) -> None:
        self._grader = grader
        self._parts = parts
        self._runs = runs
        self._images = images

    async def prove(self, task: Task) -> Proof:
        """Does not raise for a task that is wrong or sandboxes that fail: that is the proof's verdict."""
        began = time.monotonic()
        found = _Findings()
        try:
            if self._images is not None:
                await self._images.ensure(task, self._parts.provider.name)
            found.image = await image_of(task, self._parts.provider)
            verdict = await self._prove(task, found)
        except TurnstileError as error:
            infrastructure = error.fault is Fault.INFRASTRUCTURE
            verdict = ProofVerdict.NOT_TRIED if infrastructure else ProofVerdict.WRONG
            found.problems.append(error.message)
        return Proof(
            task.id,
            verdict,
            tuple(found.problems),
            time.monotonic() - began,
            tuple(found.works),
            found.image,
            task.trust,
            found.leak_note,
        )

    async def _prove(self, task: Task, found: _Findings) -> ProofVerdict:
        if task.environment is not None:
            return await self._prove_environment(task, task.environment, found)
        if not task.graders:
            return ProofVerdict.NOT_GRADED
        if task.gold is None:
            found.problems.append("it has no gold solution, so nothing shows that it can be solved")
            return ProofVerdict.WRONG
        if task.steps:
            return await self._prove_steps(task, task.gold, found)
        found.problems += await self._visible(task)
        works = await self._works(task, task.gold, found)
        for name, shown, wanted in (
            (GOLD, "the gold solution", _scores(task.gold.reward)),
            (NOTHING, "the empty work", _scores_less(task.gold.reward)),
            *((wrong.name, f"the wrong work {wrong.name!r}", _scores(wrong.reward)) for wrong in task.wrong),
        ):
            grades, seconds = [], []
            for _ in range(self._runs):
                began = time.monotonic()
                grades.append(await self._grader.grade(task, works[name]))
                seconds.append(time.monotonic() - began)
            found.add(name, shown, grades, seconds, wanted)
        return ProofVerdict.WRONG if found.problems else ProofVerdict.PROVEN

    async def _prove_environment(self, task: Task, environment: TaskEnvironment, found: _Findings) -> ProofVerdict:
        """Like any task, but each grade is of an environment of its own, made from the same seed: one that is not
        the same twice shows itself in grades that differ."""
        if not task.graders:
            await play_environment(task, self._parts, solve=False)
            return ProofVerdict.NOT_GRADED
        if task.gold is None and environment.unsolvable is not None:
            found.problems.append(f"{environment.unsolvable}, so nothing shows that the task can be solved")
            return ProofVerdict.WRONG
        best = Gold().reward if task.gold is None else task.gold.reward
        for name, shown, wanted in (
            (GOLD, "the known solution", _scores(best)),
            (NOTHING, "doing nothing", _scores_less(best)),
        ):
            grades, seconds = [], []
            for _ in range(self._runs):
                began = time.monotonic()
                begun, work = await play_environment(task, self._parts, solve=name == GOLD)
                grades.append(await self._grader.grade(begun, work))
                seconds.append(time.monotonic() - began)
            found.add(name, shown, grades, seconds, wanted)
        return ProofVerdict.WRONG if found.problems else ProofVerdict.PROVEN

    async def _prove_steps(self, task: Task, gold: Gold, found: _Findings) -> ProofVerdict:
        """Each grade is of all steps, played anew. What an agent finds at a step may not hold the solution of that
        one or of a later one."""
        steps = [task.at_step(index) for index in range(len(task.steps))]

        async def solve(sandbox: Sandbox, index: int) -> None:
            own = steps[index].gold or Gold()
            if (said := await put_gold(sandbox, own, self._parts.archive_of)) is not None:
                found.said[GOLD] = f"{task.steps[index].name}: {said}"

        async def look(sandbox: Sandbox, index: int) -> None:
            if not searched:
                for step in steps[index:]:
                    await self._search(sandbox, step, step.gold or Gold(), found)

        for name, shown, wanted, play in (
            (GOLD, "the gold solution", _scores(gold.reward), solve),
            (NOTHING, "the empty work", _scores_less(gold.reward), look),
        ):
            grades, seconds, searched = [], [], False
            for _ in range(self._runs):
                began = time.monotonic()
                grades.append(await played_steps(task, self._parts, self._grader, play))
                seconds.append(time.monotonic() - began)
                searched = True
            found.add(name, shown, grades, seconds, wanted)
        return ProofVerdict.WRONG if found.problems else ProofVerdict.PROVEN

    async def _visible(self, task: Task) -> list[str]:
        """Problems in the tests' text."""
        if task.tests is None:
            return []
        return runs_the_work(task.tests, await self._read(task.tests.files))

    async def _works(self, task: Task, gold: Gold, found: _Findings) -> dict[str, Work]:
        """The works by name: of an agent that does nothing, that does what the gold solution says, and of each
        that is known to be wrong. Looks for leaks where an agent would begin."""
        golds = {GOLD: gold, **{wrong.name: wrong for wrong in task.wrong}}
        if not task.grades_files:
            found.leak_note = "only an answer is graded"
            return {NOTHING: Work(), **{name: Work(answer=each.answer) for name, each in golds.items()}}
        works: dict[str, Work] = {}
        for name, each in golds.items():
            sandbox = await self._parts.provider.create(self._parts.spec_of(task))
            try:
                await prepare_for_agent(sandbox, task, self._parts.archive_of, self._parts.settings.tasks)
                if name == GOLD:
                    works[NOTHING] = Work(archive=await self._fetch(sandbox, task))
                    await self._search(sandbox, task, gold, found)
                found.said[name] = await put_gold(sandbox, each, self._parts.archive_of)
                works[name] = Work(archive=await self._fetch(sandbox, task), answer=each.answer)
            except FileProblem as error:
                raise FileProblem(
                    f"The files of task {task.id} cannot be put in place: {error.message}"
                ) from error
            finally:
                with anyio.CancelScope(shield=True):
                    await sandbox.destroy()
        return works

    async def _search(self, sandbox: Sandbox, task: Task, gold: Gold, found: _Findings) -> None:
        tests = [await self._read(judge.files) for judge in (task.tests, task.script) if judge is not None]
        hidden = {name: data for files in tests for name, data in files.items()}
        texts = secret_texts(await self._read(task.base), await self._read(gold.files), hidden)
        texts += patch_texts(gold.patch, reverse=gold.reverse)
        report: LeakReport = await find_leaks(
            sandbox, texts, self._parts.settings.grading, own_image=found.image is not None
        )
        found.problems += report.leaks
        found.leak_note = report.note

    async def _read(self, files: Files | None) -> dict[str, bytes]:
        if files is None:
            return {}
        return await anyio.to_thread.run_sync(read_files, files, self._parts.settings.tasks)

    async def _fetch(self, sandbox: Sandbox, task: Task) -> bytes:
        await sandbox.stop_all()
        return await fetch_work(sandbox, task, self._parts.max_work_bytes)


async def image_of(task: Task, provider: SandboxProvider) -> ImageFacts | None:
    """The image that the task's sandboxes have. Raises SandboxUnavailable."""
    return await provider.image_facts(task.image) if task.needs_sandbox else None


async def judging_image_of(task: Task, provider: SandboxProvider) -> ImageFacts | None:
    """The image in which its script judges, where that is another. Raises SandboxUnavailable."""
    own = None if task.script is None else task.script.image
    return None if own is None else await provider.image_facts(own)


_Wanted = Callable[[float | None], str | None]
"""Checks a reward. Returns how it is wrong, as the end of a sentence; None: it is as it must be."""


def _scores(wanted: float) -> _Wanted:
    return lambda reward: None if reward == wanted else f", not {wanted:g}"


def _scores_less(best: float) -> _Wanted:
    def wrong(reward: float | None) -> str | None:
        if reward is None or reward < best:
            return None
        return ", too" if reward == best else f", more than {best:g}"

    return wrong


class _Findings:
    """Findings of one proof so far."""

    def __init__(self) -> None:
        self.problems: list[str] = []
        self.works: list[WorkRuns] = []
        self.image: ImageFacts | None = None
        self.leak_note: str | None = None
        self.said: dict[str, str | None] = {}
        """Output of each work's program, where it failed."""

    def add(
        self, name: str, shown: str, grades: Sequence[Grade], seconds: Sequence[float], wanted: _Wanted
    ) -> None:
        """``shown``: the work as the subject of a sentence."""
        failed = Counter(test for grade in grades for test in set(failed_tests(grade)))
        flaky = {test: count for test, count in sorted(failed.items()) if count < len(grades)}
        self.works.append(WorkRuns(name, tuple(grade.reward for grade in grades), tuple(seconds), flaky))
        said = self.said.get(name)
        self.problems += [f"{each}\n  {said}" if said else each for each in _compared(shown, grades, wanted)]


def _compared(name: str, grades: Sequence[Grade], wanted: _Wanted) -> list[str]:
    """Problems that the grades of one work show."""
    first = grades[0]
    if (how := wanted(first.reward)) is not None:
        return [f"{name} scores {_shown(first.reward)}{how}{_why(first) if not how.startswith(', too') else ''}"]
    for other in grades[1:]:
        if outcome(first) != outcome(other):
            differing = sum(outcome(first) != outcome(each) for each in grades)
            often = f" (in {differing} of {len(grades)} runs another than the first)" if len(grades) > 2 else ""
            return [f"{name} scores {_shown(first.reward)}, then {_shown(other.reward)}{often}{_why(other)}"]
    return []


def _shown(reward: float | None) -> str:
    return "nothing" if reward is None else f"{reward:g}"


def outcome(grade: Grade) -> tuple[float | None, Mapping[str, float], list[str]]:
    """The part of a grade that must be the same for the same work: reward, components, failed tests."""
    return grade.reward, grade.components, failed_tests(grade)


def failed_tests(grade: Grade) -> list[str]:
    return sorted(one["id"] for tests in _of_tests(grade).values() for one in tests.get("failed", ()))


def _of_tests(grade: Grade) -> dict[str, Mapping[str, Any]]:
    """Details of graders that run tests and say which failed, by component."""
    return {
        name: found
        for name, found in grade.detail.items()
        if name != "script" and isinstance(found, Mapping) and "trust" in found
    }


def _why(grade: Grade) -> str:
    """Reasons why a work did not score 1, in full, as the rest of a sentence."""
    diff: Mapping[str, Any] = grade.detail.get("diff", {})
    answer: Mapping[str, Any] = grade.detail.get("answer", {})
    reasons: list[str] = []
    for name, tests in _of_tests(grade).items():
        failed = [f"{one['id']} {one['status']}: {one['message']}" for one in tests.get("failed", ())]
        if not failed and grade.components.get(name) == 0.0:
            said = tests.get("note") or diff.get("refused") or f"exit status {tests.get('exit_code')}"
            failed.append(f"{said}. {tests.get('output', '')}".strip())
        if {one.get("status") for one in tests.get("failed", ())} == {"missing"} and "output" in tests:
            failed.append(f"the runner's last lines: {last_lines(str(tests['output']))}")
        reasons += failed
    if answer and not answer["right"]:
        reasons.append(f"its answer is wrong: {answer['note']}")
    if (script := grade.detail.get("script")) is not None:
        reasons.append(str(script.get("output") or script.get("note", "")))
    for name, step in grade.detail.get("steps", {}).items():
        why = _why(Grade(step["reward"], {}, step)) if step["reward"] != 1.0 else ""
        reasons.append(f"{name}: {step['reward']:g}{why}")
    summary = grade.detail.get("summary", ())
    reasons += [line for line in summary if not reasons or line.startswith(("set-up of ", "steps: "))]
    reasons += [f"{path} is left out: {why}" for path, why in diff.get("left_out", ())]
    return "".join(f"\n  {reason}" for reason in reasons)
