"""Grades a work by every component that its task asks for.

The reward is the product of the components, so all of them must be had. A task that asks for none has no reward
(None), which is not 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import anyio

from turnstile_server.errors import TaskFailed
from turnstile_server.grading.protocol import Component, Grade, GradingTools, Work
from turnstile_server.grading.registry import GRADERS, unknown_graders
from turnstile_server.sandboxes.protocol import SandboxProvider, SandboxSpec
from turnstile_server.settings import GradingSettings, TaskSettings
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
        tools = GradingTools(provider, spec_of, settings, task_settings, anyio.Semaphore(settings.parallel))
        self._graders = {name: make(tools) for name, make in GRADERS.items()}

    async def grade(self, task: Task, work: Work) -> Grade:
        """See ``Grader``."""
        if (problem := unknown_graders(task)) is not None:
            raise TaskFailed(f"Task {task.id} cannot be graded: {problem}")
        components: dict[str, Component] = {}
        for name in task.graders:
            components[name] = await self._graders[name].grade(task, work)
        values: dict[str, float] = {}
        for name, component in components.items():
            values.update({name: component.value} if component.parts is None else component.parts)
        detail: dict[str, Any] = {}
        for component in components.values():
            detail.update(component.detail)
        summary = [line for component in components.values() for line in component.summary]
        if summary:
            detail["summary"] = summary
        return Grade(math.prod(values.values()) if values else None, values, detail)
