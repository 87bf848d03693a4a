"""Grades a work by every component that its task asks for, in the task's order.

How the components make the reward: ``composition``. Whatever a grader raises leaves the work without a reward,
with what was graded before it in the error's detail. A task that asks for no grader has no reward (None), which
is not 0.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import anyio

from turnstile_server.errors import TaskFailed, TurnstileError
from turnstile_server.grading.composition import Composition
from turnstile_server.grading.protocol import ComponentGrader, Grade, GradingTools, Work
from turnstile_server.grading.registry import ENTRY_GRADERS, GRADERS, unknown_graders
from turnstile_server.grading.retries import with_retries
from turnstile_server.sandboxes.protocol import SandboxProvider, SandboxSpec
from turnstile_server.settings import GradingSettings, TaskSettings
from turnstile_server.tasks.grader_options import GraderOptions
from turnstile_server.tasks.model import Task


class TaskGrader:
    """A ``Grader``: every registered grader, each asked for its component.

    ``spec_of`` gives the sandbox that a task is graded in. ``provider`` None: this server has no sandboxes.
    """

    def __init__(
        self,
        provider: SandboxProvider | None,
        spec_of: Callable[[Task], SandboxSpec],
        settings: GradingSettings,
        task_settings: TaskSettings,
    ) -> None:
        self._tools = GradingTools(provider, spec_of, settings, task_settings, anyio.Semaphore(settings.parallel))
        self._settings = settings
        self._graders = {name: make(self._tools) for name, make in GRADERS.items()}

    async def grade(self, task: Task, work: Work) -> Grade:
        """See ``Grader``."""
        if (problem := unknown_graders(task)) is not None:
            raise TaskFailed(f"Task {task.id} cannot be graded: {problem}")
        made, not_run = Composition(task), []
        for name in task.reward.ordered(task.graders):
            if made.closed:
                not_run.append(name)
                continue
            try:
                grade = partial(self._grader_of(task, name).grade, task, work)
                made.add(name, await with_retries(grade, self._settings))
            except TurnstileError as error:
                raise _with_evidence(error, name, made) from error.__cause__
        try:
            return made.grade(not_run)
        except TurnstileError as error:
            raise _with_evidence(error, None, made) from None

    def _grader_of(self, task: Task, name: str) -> ComponentGrader:
        entry = task.grading.get(name)
        if isinstance(entry, GraderOptions):
            return ENTRY_GRADERS[entry.grader](self._tools, name, entry)
        return self._graders[name]


def _with_evidence(error: TurnstileError, grader: str | None, made: Composition) -> TurnstileError:
    """``error`` with what the graders before it found. ``grader`` None: all of them are done."""
    own = error.detail if isinstance(error.detail, dict) else {"detail": error.detail} if error.detail else {}
    error.detail = {**own, "grader": grader, "components": made.components, "grading": made.detail}
    return error
