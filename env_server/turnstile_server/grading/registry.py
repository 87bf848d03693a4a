"""The graders, by name: the entry points of ``turnstile.graders``.

A grader's object is a class like ``ComponentGrader`` with ``Options``, and is asked for in a task's field
``grading``. The scores of a task's environment are a component beside them.
"""

from __future__ import annotations

from typing import Any

from turnstile.plugins import PluginError, is_reference
from turnstile_server.errors import TaskFailed
from turnstile_server.grading.environment_scores import EnvironmentScores
from turnstile_server.grading.protocol import ComponentGrader, GradingTools
from turnstile_server.tasks.grader_options import GRADERS, kind_of, options_of
from turnstile_server.tasks.model import Task
from turnstile_server.tasks.part import GraderOptions


def unknown_graders(task: Task) -> str | None:
    """A sentence about a grader that the task names and that this server does not have; None: it has all."""
    for name in task.graders:
        entry = task.grading.get(name)
        try:
            if entry is None or isinstance(entry, GraderOptions):
                continue  # the environment's component; or its grader was loaded to read them
            kind = kind_of(name, entry)
            if is_reference(kind):
                return f"grading: the grader {kind!r} of {name!r} is code, which only a task file may name"
            options_of(kind)
        except PluginError as error:
            return f"grading: {error}"
        return f"grading: `{kind}` has no options, so no task can ask for it"
    return None


def create_grader(task: Task, name: str, tools: GradingTools) -> ComponentGrader:
    """The grader of the task's component ``name``, for one grading. Raises TaskFailed."""
    entry: Any = task.grading.get(name)
    if entry is None:
        return EnvironmentScores(tools, name, None)
    try:
        made: ComponentGrader = GRADERS.load(entry.grader)(tools, name, entry)
    except PluginError as error:
        raise TaskFailed(f"Task {task.id} cannot be graded: {error}") from error
    return made


def is_ours(task: Task, name: str) -> bool:
    """True where the grader of the task's component ``name`` is Turnstile's."""
    entry = task.grading.get(name)
    return not isinstance(entry, GraderOptions) or GRADERS.find(entry.grader).ours
