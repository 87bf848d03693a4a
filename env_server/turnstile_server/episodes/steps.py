"""The steps of an episode of a multi-step task, played one after another in its one sandbox.

Each has an agent process of its own, so a conversation and a root in the token tree of its own. When it has ended,
every process is stopped, the work folder is fetched and judged in a sandbox of its own, and the grade says whether
the next step begins. What must hold:

1. The budgets, the key and the clock are the episode's. The clock begins with the first step, and stands still
   while a step is prepared, drained or judged.
2. A grading that the infrastructure fails ends the episode without a reward; an agent that fails ends it with the
   lowest one. A step whose time is over is judged as it stands, and the next one may begin.
3. A stop that is requested in the middle of a step ends the episode there: that step is judged by ``graded``, and
   no step is judged twice.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import anyio

from turnstile.models import EndedBy, EpisodeStatus, Fault, SpanKind
from turnstile_server.episodes.grading import EpisodeGrading
from turnstile_server.episodes.lifecycle import DRAINED, GRADED, Lifecycle
from turnstile_server.episodes.outcome import Outcome
from turnstile_server.episodes.sandbox import EpisodeSandbox
from turnstile_server.errors import AgentFailed, EpisodeOverdue, FileProblem, TaskFailed
from turnstile_server.gate.pipeline import CallPipeline
from turnstile_server.gate.session import EpisodeSession
from turnstile_server.grading.protocol import Grade
from turnstile_server.grading.step_grades import StepGrades
from turnstile_server.settings import GateSettings
from turnstile_server.spans import SpanRecorder
from turnstile_server.tasks.model import Task
from turnstile_server.tasks.workspace import SetUpFailed

_OF_BUDGETS = (EpisodeStatus.TIMED_OUT, EpisodeStatus.TRUNCATED)


class EpisodeSteps:
    """Owns nothing: all that it is made of is the run's. ``run_agent`` lasts as long as the agent does."""

    def __init__(
        self,
        task: Task,
        sandbox: EpisodeSandbox | None,
        grader: EpisodeGrading,
        life: Lifecycle,
        session: EpisodeSession,
        pipeline: CallPipeline,
        spans: SpanRecorder,
        gate: GateSettings,
        run_agent: Callable[[], Awaitable[Outcome]],
    ) -> None:
        assert sandbox is not None  # an agent that the server launches has one
        self._task = task
        self._sandbox = sandbox
        self._grader = grader
        self._life = life
        self._session = session
        self._pipeline = pipeline
        self._spans = spans
        self._gate = gate
        self._run_agent = run_agent
        self._grades = StepGrades(task)
        self._answer: str | None = None
        self._agent = anyio.CancelScope()
        """The cancel scope of the step that is played."""
        self._submitted = False
        self._turns_before = 0
        """Turns of the episode when the step began."""
        self._begun = False
        """The next step to be judged is prepared, and its agent may have worked."""

    async def play(self) -> Outcome:
        """Plays them until one ends the episode; that one may not be judged yet. Raises SandboxFailed, TaskFailed,
        AgentFailed."""
        self._life.restart(time.monotonic())
        while True:
            await self._begin()
            outcome = await self._play()
            if outcome.status not in GRADED or self._is_last:
                return outcome
            with self._standing_still():
                await self._drain(outcome, self._gate.drain_s if outcome.status in DRAINED else 0.0)
                judged = await self._judge(outcome, more=True)
                await self._drain(outcome, 0.0)  # calls of processes that the judging has ended
            if judged.grade is None:
                return replace(judged, grade=self._grades.unfinished)
            if self._grades.over:
                return outcome

    @contextmanager
    def _standing_still(self) -> Iterator[None]:
        self._life.stand_still(time.monotonic())
        try:
            yield
        finally:
            self._life.go_on(time.monotonic())

    @property
    def _is_last(self) -> bool:
        return len(self._grades) == len(self._task.steps) - 1

    async def _begin(self) -> None:
        index = len(self._grades)
        self._turns_before, self._answer, self._submitted = len(self._session.tree), None, False
        self._session.begin_step(index)
        with self._standing_still(), self._spans.span(SpanKind.SETUP, self._task.steps[index].name):
            try:
                await self._sandbox.begin_step(self._task, index)
            except (SetUpFailed, FileProblem) as error:
                if index == 0:
                    raise TaskFailed(error.message) from error
                raise AgentFailed(
                    f"what the agent left keeps the next step from being prepared: {error.message}"
                ) from error
        self._begun = True

    async def _play(self) -> Outcome:
        timeout_s = self._task.steps[len(self._grades)].timeout_s
        with anyio.move_on_after(timeout_s) as self._agent:
            return await self._run_agent()
        if self._submitted:
            return Outcome(EpisodeStatus.COMPLETED, by=EndedBy.SUBMISSION)
        return Outcome(
            EpisodeStatus.TIMED_OUT,
            EpisodeOverdue(f"the step ran longer than its agent.timeout_sec = {timeout_s:g} s"),
        )

    def submit(self, answer: str, *, ends: bool) -> None:
        """``ends``: the agent's part in the step is over with it."""
        self._answer = answer
        if ends:
            self._submitted = True
            self._agent.cancel()

    async def _drain(self, outcome: Outcome, wait_s: float) -> None:
        """As at the end of an episode, before another agent begins."""
        with self._spans.span(SpanKind.DRAIN, self._task.steps[self._session.step].name):
            await self._pipeline.drain(self._session, wait_s, outcome.status.value)

    async def _judge(self, outcome: Outcome, *, more: bool) -> Outcome:
        index = len(self._grades)
        judged = await self._grader.graded(outcome, self._task.at_step(index), self._answer, keep=False, more=more)
        if judged.grade is not None:
            self._grades.add(judged.grade, self._evidence(outcome))
            self._begun = False
        return judged

    def _evidence(self, outcome: Outcome) -> dict[str, Any]:
        """``first_turn``: its number among the episode's turns in commit order."""
        turns = len(self._session.tree) - self._turns_before
        ended = {"status": outcome.status.value, "error": None if outcome.error is None else outcome.error.message}
        return {**ended, "first_turn": self._turns_before, "turns": turns}

    async def graded(self, outcome: Outcome, task: Task, answer: str | None) -> Outcome:
        """As ``EpisodeGrading.graded``, for the episode: judges the step that was played last, where that was not
        done. The task and the answer are those of the steps."""
        if self._begun and not self._grades.over:
            judged = await self._judge(outcome, more=False)
            if judged.grade is None:
                return replace(judged, grade=self._grades.unfinished)
        infrastructure = outcome.error is not None and outcome.error.fault is Fault.INFRASTRUCTURE
        spent = outcome.status in _OF_BUDGETS and not infrastructure
        return replace(outcome, grade=self._grades.grade(spent=spent))

    def unearned(self, task: Task, why: str) -> Grade:
        """As ``EpisodeGrading.unearned``."""
        return self._grades.unearned(why)
