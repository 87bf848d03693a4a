"""Graders whose code runs in a process of its own on the server's machine.

What must hold: code comes from the settings or from a task file of this machine, never from a request; a crash, a
time-out or a number that is not finite is no reward and never 0. A text that does not fit its schema, or that
takes too long to check, is the agent's doing, and 0.
"""

from __future__ import annotations

import math
from typing import Any

from turnstile_server.grading.bounds import GradingBounds
from turnstile_server.grading.errors import GraderFailed
from turnstile_server.grading.protocol import Component, ComponentGrader, GradingTools, Work
from turnstile_server.grading.verdict import printable
from turnstile_server.grading.work_files import WorkReader
from turnstile_server.kinds.host_code.options import FunctionOptions, RubricOptions, SchemaOptions
from turnstile_server.kinds.host_code.runner_process import RanTooLong, run_code
from turnstile_server.tasks.model import Task


class CodeGrader(ComponentGrader):
    """A Python function, or an OpenEnv rubric."""

    def __init__(self, tools: GradingTools, name: str, options: FunctionOptions | RubricOptions) -> None:
        self._tools = tools
        self._name = name
        self._options = options
        self._kind = options.grader
        self._target = options.host_code or tools.settings.functions[options.target]

    async def grade(self, task: Task, work: Work) -> Component:
        """See ``ComponentGrader``."""
        options = self._options
        found = await WorkReader(self._tools).read(task, work, options.files, self._name)
        if found.spoiled is not None:
            return found.spoiled
        files = {path: file.data for path, file in found.work.items()}
        request = {
            "kind": self._kind,
            "target": self._target,
            "task": task.model_dump(mode="json"),
            "answer": work.answer,
            "files": files,
            "facts": {
                **work.facts,
                "world_scores": None if work.environment_scores is None else dict(work.environment_scores),
            },
            "arguments": options.arguments,
        }
        what = f"the grader {self._name!r} ({options.target})"
        try:
            async with self._tools.places.place(work.span):
                answer = await run_code(what, request, options.timeout_s, self._tools.settings.python)
        except RanTooLong as error:
            raise GraderFailed(f"{error} (timeout_s)") from None
        return self._component(answer)

    def _component(self, answer: dict[str, Any]) -> Component:
        parts = answer.get("components")
        value = math.prod(parts.values()) if parts is not None else answer["value"]
        extra = {f"{self._name}.{name}": score for name, score in answer.get("extra", {}).items()}
        given = parts if parts is not None else {self._name: value}
        summary = tuple(f"{self._name}: {printable(name)} is {one:g}" for name, one in given.items() if one < 1)
        return Component(value, {self._name: {"code": self._target}}, summary, parts, extra=extra)


class FunctionGrader(CodeGrader):
    """A Python function."""

    Options = FunctionOptions


class RubricGrader(CodeGrader):
    """An OpenEnv rubric, or what makes one."""

    Options = RubricOptions


class SchemaGrader(ComponentGrader):
    """1 where the answer, or a file of the work, is JSON that fits a schema."""

    Options = SchemaOptions

    def __init__(self, tools: GradingTools, name: str, options: SchemaOptions) -> None:
        self._tools = tools
        self._name = name
        self._options = options

    async def grade(self, task: Task, work: Work) -> Component:
        """See ``ComponentGrader``."""
        text = work.answer
        if self._options.file is not None:
            found = await WorkReader(self._tools).read(task, work, [self._options.file], self._name)
            if found.spoiled is not None:
                return found.spoiled
            file = found.work[self._options.file]
            if file.data is None:
                return self._wrong([f"{self._options.file}: {file.missing}"])
            text = file.data.decode(errors="replace")
        if text is None:
            return self._wrong(["nothing was submitted"])
        bounds = self._tools.settings.bounds_of(GradingBounds)
        request = {
            "kind": "schema",
            "schema": self._options.schema_,
            "text": text,
            "most": bounds.max_shown,
        }
        try:
            async with self._tools.places.place(work.span):
                answer = await run_code(f"the grader {self._name!r}", request, bounds.schema_timeout_s)
        except RanTooLong:
            return self._wrong([f"not checked within {bounds.schema_timeout_s:g} s"])
        wrong = answer.get("wrong")
        return Component(1.0, {self._name: {"fits": True}}) if wrong is None else self._wrong(wrong)

    def _wrong(self, why: list[str]) -> Component:
        lines = tuple(printable(f"{self._name}: {line}") for line in why)
        return Component(0.0, {self._name: {"fits": False, "errors": why}}, lines)
