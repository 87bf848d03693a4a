"""A task under certification: something acts in the place of an agent, the work is graded by the real grader, and
the grades that several checks need are kept.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace

from turnstile_server.grading.certification.declarations import DeclaredReward
from turnstile_server.grading.proof_works import BegunEpisode, ProofParts, begin, collect, play_solution
from turnstile_server.grading.protocol import Grade, Grader, Work
from turnstile_server.grading.steps_validation import played_steps
from turnstile_server.sandboxes.protocol import Sandbox
from turnstile_server.tasks.model import Task
from turnstile_server.tasks.part import GraderOptions

Act = Callable[[BegunEpisode], Awaitable[str | None]]
"""Acts in the place of an agent. Returns the answer to submit; None: it submits none."""


async def do_nothing(begun: BegunEpisode) -> str | None:
    return None


@dataclass
class CertifiedTask:
    """A task under certification: plays it, and keeps the grades that several checks need."""

    task: Task
    parts: ProofParts
    grader: Grader
    declared: DeclaredReward
    runs: int = 3
    """How often the same work is graded."""
    solution_said: list[str] = field(default_factory=list)
    """Output of a solution's program that did not end well."""
    _kept: dict[str, tuple[Grade, ...]] = field(default_factory=dict)
    _untouched: Work | None = None
    """The work of an agent that did nothing, for answers."""

    @property
    def maximum(self) -> float:
        """The reward of a right work."""
        if self.declared.range is not None:
            return self.declared.range[1]
        return 1.0 if self.task.gold is None else self.task.gold.reward

    @property
    def most_of_a_wrong_work(self) -> float:
        return self.maximum - self.declared.floor_margin

    @property
    def ungraded(self) -> str | None:
        """Reason why its works have no reward here; None: they have."""
        if self.task.reward.pending:
            return "its reward comes later, from the trainer, so nothing here can be measured"
        return None if self.task.graders else "nothing grades it: give it tests, an answer or another grader"

    @property
    def unsolvable(self) -> str | None:
        """Reason why no solution can be played; None: one can."""
        if self.task.gold is not None:
            return None
        if self.task.environment is None:
            return "it has no solution: add `gold`"
        return self.task.environment.unsolvable

    @property
    def reads_files(self) -> bool:
        """True if what an agent leaves in its sandbox may change the reward."""
        return self.task.needs_sandbox and (self.task.grades_files or self.task.environment is not None)

    @property
    def reads_answers(self) -> bool:
        """True if what an agent submits may change the reward."""
        readers = [not isinstance(each, GraderOptions) or each.reads_answer for each in self.task.grading.values()]
        return self.task.environment is not None or any(readers)

    async def solve(self, begun: BegunEpisode) -> str | None:
        """Plays the task's own solution: an ``Act``."""
        played = await play_solution(begun, self.parts)
        if played.said is not None:
            self.solution_said.append(played.said)
        return played.answer

    async def play(self, act: Act) -> Grade:
        """One episode, graded."""
        if self.task.steps:
            return await self._play_steps(act)
        task, work = await self._work(act)
        return await self.grader.grade(task, work)

    async def answer(self, text: str) -> Grade:
        """One episode in which nothing is done but an answer submitted, graded."""
        if self.task.environment is None and not self.task.steps:
            if self._untouched is None:
                _, self._untouched = await self._work(do_nothing)
            return await self.grader.grade(self.task, replace(self._untouched, answer=text))

        async def submit(begun: BegunEpisode) -> str | None:
            return text

        return await self.play(submit)

    async def gold_grades(self) -> tuple[Grade, ...]:
        """Of the solution; the same work each time where nothing but the work is judged."""
        return await self._graded("gold", self.solve)

    async def nothing_grades(self) -> tuple[Grade, ...]:
        """Of an agent that does nothing."""
        return await self._graded("nothing", do_nothing)

    async def _graded(self, name: str, act: Act) -> tuple[Grade, ...]:
        if name not in self._kept:
            if self.task.steps or self.task.environment is not None:
                self._kept[name] = tuple([await self.play(act) for _ in range(self.runs)])
            else:
                task, work = await self._work(act)
                self._kept[name] = tuple([await self.grader.grade(task, work) for _ in range(self.runs)])
        return self._kept[name]

    async def _work(self, act: Act) -> tuple[Task, Work]:
        reads_nothing = not self.task.grades_files and act is do_nothing
        if self.task.environment is None and (reads_nothing or not self.task.needs_sandbox):
            return self.task, Work(answer=await act(BegunEpisode(self.task, None, None)))
        async with begin(self.task, self.parts) as begun:
            answer = await act(begun)
            return begun.task, await collect(begun, answer, self.parts.max_work_bytes, solved=act == self.solve)

    async def _play_steps(self, act: Act) -> Grade:
        async def step(sandbox: Sandbox, index: int) -> None:
            await act(BegunEpisode(self.task.at_step(index), sandbox, None))

        return await played_steps(self.task, self.parts, self.grader, step)
