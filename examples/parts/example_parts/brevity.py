"""A grader: ``grading: {brevity: {chars: 80}}`` gives 1 for an answer of at most 80 characters, else 0."""

from __future__ import annotations

from pydantic import Field

from turnstile_server.grading.protocol import Component, ComponentGrader, GradingTools, Work
from turnstile_server.tasks.model import Task
from turnstile_server.tasks.part import GraderOptions


class BrevityOptions(GraderOptions):
    chars: int = Field(ge=1, description="The most characters of an answer.")


class BrevityGrader(ComponentGrader):
    Options = BrevityOptions

    def __init__(self, tools: GradingTools, name: str, options: BrevityOptions) -> None:
        self._name = name
        self._most = options.chars

    async def grade(self, task: Task, work: Work) -> Component:
        length = len(work.answer or "")
        if 0 < length <= self._most:
            return Component(1.0)
        why = f"{self._name}: the answer has {length} characters, at most {self._most} are wanted"
        return Component(0.0, summary=(why,))
