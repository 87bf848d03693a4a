"""Grades a work by every component that its task asks for, in the task's order.

How the components make the reward: ``composition``. Whatever a grader raises leaves the work without a reward,
with what was graded before it in the error's detail. A task that asks for no grader has no reward (None), which
is not 0.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

from turnstile.models import LeftOut, SpanKind, WorkDiff
from turnstile_server.errors import TaskFailed, TurnstileError
from turnstile_server.grading.composition import Composition
from turnstile_server.grading.errors import GraderFailed
from turnstile_server.grading.package_processes import PackageProcesses
from turnstile_server.grading.places import GradingPlaces
from turnstile_server.grading.protocol import Component, ComponentGrader, Grade, GradingTools, Work
from turnstile_server.grading.registry import create_grader, is_ours, unknown_graders
from turnstile_server.grading.retries import with_retries
from turnstile_server.grading.work_diff import WorkDiffer
from turnstile_server.sandboxes.protocol import SandboxProvider, SandboxSpec
from turnstile_server.settings import GradingSettings, TaskSettings
from turnstile_server.spans import nested
from turnstile_server.tasks.model import Task
from turnstile_server.tasks.shared import Shared

_LOG = logging.getLogger(__name__)


class TaskGrader:
    """A ``Grader``: each grader of a task is asked for its component.

    ``spec_of`` gives the sandbox that a task is graded in. ``provider`` None: this server has no sandboxes.
    ``data_dir``: where graders keep files, such as verdicts of judges; None: nowhere. ``places``: None: its own.
    """

    def __init__(
        self,
        provider: SandboxProvider | None,
        spec_of: Callable[[Task], SandboxSpec],
        settings: GradingSettings,
        task_settings: TaskSettings,
        data_dir: Path | None = None,
        places: GradingPlaces | None = None,
    ) -> None:
        self._tools = GradingTools(
            provider,
            spec_of,
            settings,
            task_settings,
            places or GradingPlaces(settings.places),
            PackageProcesses(settings, task_settings),
            data_dir,
        )
        self._settings = settings
        self._differ = WorkDiffer(self._tools)

    async def grade(self, task: Task, work: Work) -> Grade:
        """See ``Grader``."""
        if (problem := unknown_graders(task)) is not None:
            raise TaskFailed(f"Task {task.id} cannot be graded: {problem}")
        made, not_run = Composition(task), []
        tools = replace(self._tools, of_grading=Shared())
        for name in task.reward.ordered(task.graders):
            if made.closed:
                not_run.append(name)
                continue
            try:
                with _typed(task, name):
                    grader = create_grader(task, name, tools)
                grade = partial(_tried, name, grader, task, work)
                made.add(name, await with_retries(grade, self._settings))
            except TurnstileError as error:
                raise _with_evidence(error, name, made) from error.__cause__
        try:
            return made.grade(not_run)
        except TurnstileError as error:
            raise _with_evidence(error, None, made) from None

    async def diff(self, episode_id: str, task: Task, archive: bytes, left_out: Iterable[LeftOut]) -> WorkDiff:
        """See ``Grader``."""
        return await self._differ.diff(episode_id, task, archive, left_out)

    async def close(self) -> None:
        """See ``Grader``."""
        await self._tools.packages.close()


async def _tried(name: str, grader: ComponentGrader, task: Task, work: Work) -> Component:
    """Raises GraderFailed for whatever a grader of another package raises beside typed errors."""
    with nested(work.span, SpanKind.GRADER, name) as span:
        with _typed(task, name):
            component = await grader.grade(task, replace(work, span=span))
        if span is not None:
            span.note(value=component.value)
        return component


@contextmanager
def _typed(task: Task, name: str) -> Iterator[None]:
    try:
        yield
    except TurnstileError:
        raise
    except (Exception, SystemExit) as error:
        if is_ours(task, name):
            raise
        _LOG.exception("the grader %r failed", name)
        raise GraderFailed(f"the grader {name!r} failed: {type(error).__name__}: {error}") from error


def _with_evidence(error: TurnstileError, grader: str | None, made: Composition) -> TurnstileError:
    """``error`` with what the graders before it found. ``grader`` None: all of them are done."""
    own = error.detail if isinstance(error.detail, dict) else {"detail": error.detail} if error.detail else {}
    error.detail = {**own, "grader": grader, "components": made.components, "grading": made.detail}
    return error
