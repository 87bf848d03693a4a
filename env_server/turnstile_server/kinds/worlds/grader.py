"""Takes over what the world of an episode said about its own state.

The owner of the episode asks the world (``EpisodeWorld.grade``) while the world and the sandbox are still there;
this grader only takes the numbers over.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Self

from turnstile_server.errors import TaskFailed
from turnstile_server.grading.protocol import Component, ComponentGrader, GradingTools, Work
from turnstile_server.tasks.model import Task
from turnstile_server.tasks.part import GraderOptions


class WorldOptions(GraderOptions):
    """No options: the class of a world is a task source."""

    in_field = True

    @classmethod
    def of_entry(cls, entry: Mapping[str, object]) -> Self:
        """Raises ValueError: text from outside names no code of this machine."""
        raise ValueError("a class is a task source of its own, `file.py:Class`; it is not named in a task")


class WorldGrader(ComponentGrader):
    """The component ``world``, or the components that the world's ``grade`` names."""

    Options = WorldOptions

    def __init__(self, tools: GradingTools, name: str, options: None) -> None:
        pass

    async def grade(self, task: Task, work: Work) -> Component:
        """See ``ComponentGrader``."""
        scores = work.environment_scores
        if scores is None:
            raise TaskFailed(f"task {task.id} is graded by its world, and nothing asked the world")
        summary = tuple(f"world: {name} is {value:g}" for name, value in scores.items() if value < 1)
        return Component(math.prod(scores.values()), summary=summary, parts=scores)
