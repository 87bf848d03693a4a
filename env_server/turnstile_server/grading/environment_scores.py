"""Takes over what the environment of an episode said about its own state.

The owner of the episode asks the environment (``EpisodeEnvironment.grade``) while it and the sandbox are still
there; this grader only takes the numbers over.
"""

from __future__ import annotations

import math

from turnstile_server.errors import TaskFailed
from turnstile_server.grading.protocol import Component, ComponentGrader, GradingTools, Work
from turnstile_server.tasks.model import Task


class EnvironmentScores(ComponentGrader):
    """The component that the environment names, or the components that its ``grade`` names."""

    def __init__(self, tools: GradingTools, name: str, options: object) -> None:
        self._name = name

    async def grade(self, task: Task, work: Work) -> Component:
        """See ``ComponentGrader``."""
        scores = work.environment_scores
        if scores is None:
            raise TaskFailed(f"task {task.id} is graded by its environment, and nothing asked that")
        summary = tuple(f"{self._name}: {name} is {value:g}" for name, value in scores.items() if value < 1)
        return Component(math.prod(scores.values()), summary=summary, parts=scores)
