"""Graders of the submitted answer that a task names in ``grading``: one of some texts, near a number, patterns.

They are the graders of the field ``answer`` with partial credit, under any name and as often as a task likes.
"""

from __future__ import annotations

from decimal import Decimal

from turnstile_server.grading.answers import AnswerVerdict, judge_answer, parse_number
from turnstile_server.grading.bounds import GradingBounds
from turnstile_server.grading.protocol import Component, ComponentGrader, GradingTools, Work
from turnstile_server.tasks.answer import Answer
from turnstile_server.tasks.grader_options import ExactOptions, NumericOptions, RegexOptions
from turnstile_server.tasks.model import Task


class ExactGrader(ComponentGrader):
    """Credit for one of some texts."""

    Options = ExactOptions

    def __init__(self, tools: GradingTools, name: str, options: ExactOptions) -> None:
        self._name = name
        wanted = {} if options.value is None else {options.value: 1.0}
        self._credit = {self._plain(text, options): credit for text, credit in (options.credit | wanted).items()}
        self._options = options

    @staticmethod
    def _plain(text: str, options: ExactOptions) -> str:
        return text.strip().casefold() if options.ignore_case else text.strip()

    async def grade(self, task: Task, work: Work) -> Component:
        """See ``ComponentGrader``."""
        if work.answer is None:
            return _component(self._name, 0.0, "nothing was submitted")
        credit = self._credit.get(self._plain(work.answer, self._options), 0.0)
        return _component(self._name, credit, "another text" if credit == 0 else "a text with partial credit")


class NumericGrader(ComponentGrader):
    """Credit for a number, by its distance."""

    Options = NumericOptions

    def __init__(self, tools: GradingTools, name: str, options: NumericOptions) -> None:
        self._name = name
        self._options = options

    async def grade(self, task: Task, work: Work) -> Component:
        """See ``ComponentGrader``."""
        if work.answer is None:
            return _component(self._name, 0.0, "nothing was submitted")
        number = parse_number(work.answer.strip())
        if number is None:
            return _component(self._name, 0.0, "not one finite number")
        options = self._options
        distance = abs(number - Decimal(str(options.value)))
        if distance <= Decimal(str(options.tolerance)):
            return _component(self._name, 1.0, "")
        if options.zero_at is None or distance >= Decimal(str(options.zero_at)):
            return _component(self._name, 0.0, "another number")
        credit = (options.zero_at - float(distance)) / (options.zero_at - options.tolerance)
        return _component(self._name, min(1.0, max(0.0, credit)), f"off by {distance}")


class RegexGrader(ComponentGrader):
    """Credit for the share of the patterns that the answer matches."""

    Options = RegexOptions

    def __init__(self, tools: GradingTools, name: str, options: RegexOptions) -> None:
        self._name = name
        self._options = options
        self._timeout_s = tools.settings.bounds_of(GradingBounds).regex_timeout_s

    async def grade(self, task: Task, work: Work) -> Component:
        """See ``ComponentGrader``."""
        missed: list[tuple[str, AnswerVerdict]] = []
        for pattern in self._options.patterns:
            wanted = Answer(kind="regex", value=pattern, ignore_case=self._options.ignore_case)
            verdict = await judge_answer(wanted, work.answer, self._timeout_s)
            if not verdict.right:
                missed.append((pattern, verdict))
        credit = 1.0 - len(missed) / len(self._options.patterns)
        return _component(
            self._name, credit, "; ".join(f"{pattern!r:.60}: {one.note}" for pattern, one in missed[:5])
        )


def _component(name: str, credit: float, note: str) -> Component:
    if credit == 1.0:
        return Component(1.0, {name: {"credit": 1.0}})
    return Component(credit, {name: {"credit": credit, "note": note}}, (f"{name}: {note}",))
