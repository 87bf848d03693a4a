"""The graders, by name. A new one is one module with a ``ComponentGrader`` and one line here.

``GRADERS`` are asked for by the name of their component: ``answer``, ``r2e``, ``script``, ``swe``, ``tests`` and
``world`` by fields of the task, the others in its field ``grading``, where they check their options themselves.
``ENTRY_GRADERS`` are asked for in ``grading`` under any name, as often as a task likes; what they take is a model
in ``tasks/grader_options.py``, which is checked when a task is loaded.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from turnstile_server.grading.answer_entries import ExactGrader, NumericGrader, RegexGrader
from turnstile_server.grading.answers import AnswerGrader
from turnstile_server.grading.hidden_tests import HiddenTestsGrader
from turnstile_server.grading.host_code.graders import CodeGrader, SchemaGrader
from turnstile_server.grading.judge.grader import JudgeGrader
from turnstile_server.grading.package_grader import PackageGrader
from turnstile_server.grading.protocol import ComponentGrader, GradingTools
from turnstile_server.grading.r2e import R2eGrader
from turnstile_server.grading.resource_server import ResourceServerGrader
from turnstile_server.grading.script import ScriptGrader
from turnstile_server.grading.swe import SweGrader
from turnstile_server.grading.world import WorldGrader
from turnstile_server.tasks.grader_options import kind_of
from turnstile_server.tasks.model import Task

GRADERS: dict[str, Callable[[GradingTools], ComponentGrader]] = {
    "answer": AnswerGrader,
    "swe": SweGrader,
    "r2e": R2eGrader,
    "script": ScriptGrader,
    "tests": HiddenTestsGrader,
    "world": WorldGrader,
}

ENTRY_GRADERS: dict[str, Callable[[GradingTools, str, Any], ComponentGrader]] = {
    "exact": ExactGrader,
    "function": CodeGrader,
    "json_schema": SchemaGrader,
    "judge": JudgeGrader,
    "numeric": NumericGrader,
    "regex": RegexGrader,
    "resource_server": ResourceServerGrader,
    "rubric": CodeGrader,
    "verifiers": PackageGrader,
    "inspect": PackageGrader,
}
"""Made with the name of the entry and its options, for each grading."""


def unknown_graders(task: Task) -> str | None:
    """A sentence about graders that the task names and that are not registered; None: all are."""
    for name in task.graders:
        kind = kind_of(name, task.grading[name]) if name in task.grading else name
        if kind in GRADERS and kind != name:
            return f"grading: the grader {kind!r} has a name of its own: write `{kind}` in the place of {name!r}"
        if kind not in GRADERS and kind not in ENTRY_GRADERS:
            have = ", ".join((*GRADERS, *ENTRY_GRADERS))
            return f"grading: there is no grader {kind!r}; there are {have}"
    return None
