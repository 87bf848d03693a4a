"""Whether a server can grade a task: its graders are registered, and what they need is in the settings."""

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
