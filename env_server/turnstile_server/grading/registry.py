"""The graders, by the name of the reward component that each gives.

A new grader is one module with a ``ComponentGrader`` and one line in ``GRADERS``. A task asks for it under that
name in its field ``grading``, with options of the grader's own; ``answer``, ``tests`` and ``world`` have fields
of their own.
"""

from __future__ import annotations

from collections.abc import Callable

from turnstile_server.grading.answers import AnswerGrader
from turnstile_server.grading.hidden_tests import HiddenTestsGrader
from turnstile_server.grading.protocol import ComponentGrader, GradingTools
from turnstile_server.grading.world import WorldGrader
from turnstile_server.tasks.model import Task

GRADERS: dict[str, Callable[[GradingTools], ComponentGrader]] = {
    "answer": AnswerGrader,
    "tests": HiddenTestsGrader,
    "world": WorldGrader,
}


def unknown_graders(task: Task) -> str | None:
    """A sentence about graders that the task names and that are not registered; None: all are."""
    unknown = [name for name in task.graders if name not in GRADERS]
    if not unknown:
        return None
    return f"grading: there is no grader {', '.join(map(repr, unknown))}; there are {', '.join(GRADERS)}"
