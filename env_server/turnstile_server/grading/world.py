"""Grades by what the world of the episode said about its own state.

The owner of the episode asks the world (``EpisodeWorld.grade``) while the world and the sandbox are still there;
this grader only takes the numbers over.
"""

from __future__ import annotations

import math

from turnstile_server.errors import TaskFailed
from turnstile_server.grading.protocol import Component, ComponentGrader, GradingTools, Work
from turnstile_server.tasks.model import Task


class WorldGrader(ComponentGrader):
    """The component ``world``, or the components that the world's ``grade`` names."""

    def __init__(self, tools: GradingTools, name: str, options: None) -> None:
        pass

    async def grade(self, task: Task, work: Work) -> Component:
        """See ``ComponentGrader``."""
        scores = work.world_scores
        if scores is None:
            raise TaskFailed(f"task {task.id} is graded by its world, and nothing asked the world")
        summary = tuple(f"world: {name} is {value:g}" for name, value in scores.items() if value < 1)
        return Component(math.prod(scores.values()), summary=summary, parts=scores)
