"""Whether a server can grade a task: its graders are registered, what they need is in the settings, and the time
that they may take fits into that of a grading."""

from __future__ import annotations

from turnstile_server.grading.registry import unknown_graders
from turnstile_server.settings import GradingSettings
from turnstile_server.tasks.code_options import CodeOptions
from turnstile_server.tasks.judge_options import JudgeOptions
from turnstile_server.tasks.model import Task


def grading_problem(task: Task, settings: GradingSettings) -> str | None:
    """A sentence about what is missing, with the field; None: nothing is."""
    if (problem := unknown_graders(task)) is not None:
        return problem
    if (problem := _time_problem(task, settings.timeout_s)) is not None:
        return problem
    for name, entry in task.grading.items():
        if isinstance(entry, CodeOptions) and entry.host_code is None and entry.target not in settings.functions:
            have = ", ".join(settings.functions) or "none"
            return (
                f"grading.{name}.target: there is no {entry.target!r} in the settings (grading.functions); "
                f"there are: {have}. Code of a task file is `module:name` or `file.py:name`"
            )
        if isinstance(entry, JudgeOptions) and (problem := _judge_problem(entry, settings)) is not None:
            return f"grading.{name}.{problem}"
    return None


def _time_problem(task: Task, most_s: float) -> str | None:
    """Told before an agent plays: a grading that is out of time scores 0, whatever the tests would have said. It
    also makes a sandbox and takes the work over, so its time must be longer."""
    parts = [("tests", task.tests), ("swe", task.swe), ("r2e", task.r2e), ("script", task.script)]
    parts += [(f"steps.{step.name}.script", step.script) for step in task.steps]
    for field, part in parts:
        if part is not None and part.timeout_s >= most_s:
            return (
                f"{field}.timeout_s: {part.timeout_s:g} s, and a whole grading has {most_s:g} s "
                "(grading.timeout_s in the settings), which must be longer"
            )
    return None


def _judge_problem(entry: JudgeOptions, settings: GradingSettings) -> str | None:
    judge = settings.judges.get(entry.judge)
    if judge is None:
        have = ", ".join(settings.judges) or "none"
        return f"judge: there is no judge {entry.judge!r} in the settings (grading.judges); there are: {have}"
    if entry.calls > judge.max_calls_per_grading:
        return (
            f"votes: they need {entry.calls} calls, and the judge is asked at most {judge.max_calls_per_grading} "
            f"times for one work (grading.judges.{entry.judge}.max_calls_per_grading)"
        )
    return None
