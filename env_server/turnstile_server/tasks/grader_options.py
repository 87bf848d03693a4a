"""What the graders of a task's field ``grading`` take as options, by the graders' names.

An entry is named freely: ``grading: {polite: {grader: judge, …}}``; without ``grader`` its name is the grader's,
too. Options of a grader that is not in ``OPTIONS`` stay as they are written, for the grader to check.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal, Self

from pydantic import BeforeValidator, Discriminator, Field, FiniteFloat, Tag, model_validator

from turnstile_server.tasks.code_options import FunctionOptions, RubricOptions, SchemaOptions
from turnstile_server.tasks.judge_options import JudgeOptions
from turnstile_server.tasks.package_options import PackageOptions
from turnstile_server.tasks.part import GraderOptions
from turnstile_server.tasks.resource_server_options import ResourceServerOptions, only_of_a_source

Credit = Annotated[FiniteFloat, Field(ge=0, le=1)]
OTHER = "other"
COMPONENT_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,63}")


class ExactOptions(GraderOptions):
    """The answer is one of some texts."""

    grader: Literal["exact"]
    value: str | None = Field(None, description="The right answer.")
    credit: dict[str, Credit] = Field(default_factory=dict, description="Credit by answer, for further ones.")
    ignore_case: bool = Field(False, description="Letters' case does not matter.")

    @model_validator(mode="after")
    def _some(self) -> Self:
        if self.value is None and not self.credit:
            raise ValueError("write `value`, the right answer, or `credit`, credits by answer")
        return self


class NumericOptions(GraderOptions):
    """The answer is near a number."""

    grader: Literal["numeric"]
    value: FiniteFloat = Field(description="The right number.")
    tolerance: FiniteFloat = Field(0.0, ge=0, description="Largest |difference| with full credit.")
    zero_at: FiniteFloat | None = Field(
        None, gt=0, description="|difference| from which there is no credit; between them it falls evenly."
    )

    @model_validator(mode="after")
    def _falls(self) -> Self:
        if self.zero_at is not None and self.zero_at <= self.tolerance:
            raise ValueError("`zero_at` must be greater than `tolerance`")
        return self


class RegexOptions(GraderOptions):
    """The answer matches patterns: the credit is the share of those that it matches."""

    grader: Literal["regex"]
    patterns: tuple[str, ...] = Field(min_length=1, max_length=100, description="Each for the whole answer.")
    ignore_case: bool = Field(False, description="Letters' case does not matter.")

    @model_validator(mode="after")
    def _compile(self) -> Self:
        for pattern in self.patterns:
            try:
                re.compile(pattern)
            except re.error as error:
                raise ValueError(f"`patterns`: {pattern!r} is not a regular expression: {error}") from None
        return self


OPTIONS: Final[dict[str, type[GraderOptions]]] = {
    "exact": ExactOptions,
    "function": FunctionOptions,
    "json_schema": SchemaOptions,
    "judge": JudgeOptions,
    "numeric": NumericOptions,
    "regex": RegexOptions,
    "resource_server": ResourceServerOptions,
    "rubric": RubricOptions,
    "verifiers": PackageOptions,
    "inspect": PackageOptions,
}


def _kind_of(entry: object) -> str:
    if isinstance(entry, GraderOptions):
        kind: object = entry.grader
    else:
        kind = entry.get("grader") if isinstance(entry, Mapping) else None
    return kind if isinstance(kind, str) and kind in OPTIONS else OTHER


GradingEntry = Annotated[
    Annotated[ExactOptions, Tag("exact")]
    | Annotated[FunctionOptions, Tag("function")]
    | Annotated[SchemaOptions, Tag("json_schema")]
    | Annotated[JudgeOptions, Tag("judge")]
    | Annotated[NumericOptions, Tag("numeric")]
    | Annotated[RegexOptions, Tag("regex")]
    | Annotated[ResourceServerOptions, BeforeValidator(only_of_a_source), Tag("resource_server")]
    | Annotated[RubricOptions, Tag("rubric")]
    | Annotated[PackageOptions, Tag("verifiers")]
    | Annotated[PackageOptions, Tag("inspect")]
    | Annotated[dict[str, Any], Tag(OTHER)],
    Discriminator(_kind_of),
]
"""One entry of ``grading``."""


def name_kinds(grading: object) -> object:
    """``grading`` with ``grader`` written into each entry that is named after its grader."""
    if not isinstance(grading, Mapping):
        return grading
    for name in grading:
        if not isinstance(name, str) or not COMPONENT_NAME.fullmatch(name):
            raise ValueError(f"the name {name!r:.100} has other characters than letters, digits, `_`, `-` and `.`")
    return {
        name: {"grader": name, **entry} if name in OPTIONS and isinstance(entry, Mapping) else entry
        for name, entry in grading.items()
    }


def kind_of(name: str, entry: GradingEntry) -> str:
    """The name of the entry's grader."""
    return entry.grader if isinstance(entry, GraderOptions) else str(entry.get("grader", name))


def gives_parts(entry: GradingEntry) -> bool:
    """Whether the entry's grader may give components of other names than its own."""
    return entry.parts if isinstance(entry, GraderOptions) else True


def unit_kind(entry: GradingEntry) -> bool:
    """Whether the entry's component lies in [0, 1]."""
    return not gives_parts(entry)


def reads_work(entry: GradingEntry) -> bool:
    return entry.reads_work if isinstance(entry, GraderOptions) else True


def field_place(loc: tuple[str | int, ...]) -> tuple[str | int, ...]:
    """The path of a field as it is written, from where pydantic places an error."""
    plain = tuple(part for part in loc if part != "[key]")
    if len(plain) > 2 and plain[0] == "grading" and plain[2] in (*OPTIONS, OTHER):
        return (*plain[:2], *plain[3:])
    return plain
