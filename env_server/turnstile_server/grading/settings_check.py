"""Checks that a server can grade a task: its graders are registered, what they need is in the settings, and the
time that they may take fits into that of a grading."""

from __future__ import annotations

from turnstile_server.grading.registry import unknown_graders
from turnstile_server.settings import GradingSettings
from turnstile_server.tasks.grader_options import field_place
from turnstile_server.tasks.model import Task
from turnstile_server.tasks.part import GraderOptions


def grading_problem(task: Task, settings: GradingSettings) -> str | None:
    """A sentence about what is missing, with the field; None: nothing is."""
    if (problem := unknown_graders(task)) is not None:
        return problem
    if (problem := _time_problem(task, settings.timeout_s)) is not None:
        return problem
    for name, entry in task.grading.items():
        if isinstance(entry, GraderOptions) and (problem := entry.problem(settings)) is not None:
            return f"grading.{name}.{problem}"
    return None


def _time_problem(task: Task, most_s: float) -> str | None:
    """Told before an agent plays: a grading that is out of time scores 0, whatever the tests would have said. It
    also makes a sandbox and takes the work over, so its time must be longer."""
    judges = [("tests", task.tests), ("script", task.script)]
    judges += [(f"steps.{step.name}.script", step.script) for step in task.steps]
    times = [(field, judge.timeout_s) for field, judge in judges if judge is not None]
    for name, entry in task.grading.items():
        if isinstance(entry, GraderOptions) and entry.time_s is not None:
            times.append((".".join(map(str, field_place(("grading", name)))), entry.time_s))
    for field, time_s in times:
        if time_s >= most_s:
            return (
                f"{field}.timeout_s: {time_s:g} s, and a whole grading has {most_s:g} s "
                "(grading.timeout_s in the settings), which must be longer"
            )
    return None
