"""The entries of a task's field ``grading``: each is the options of a grader, by the grader's name.

An entry is named freely: ``grading: {polite: {grader: judge, …}}``; without ``grader`` its name is the grader's,
too. The options are checked by the grader's own model, as soon as the task is read. Those of a grader that is not
installed stay as they are written: the task is refused where it is to be graded.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Annotated, Any, Final, Literal, Self, TypeAlias

from pydantic import (
    BeforeValidator,
    Field,
    FiniteFloat,
    InstanceOf,
    SerializeAsAny,
    ValidationInfo,
    model_validator,
)

from turnstile.plugins import BrokenPlugin, PluginError, Plugins, is_reference
from turnstile_server.tasks.part import GraderOptions

GRADERS: Final = Plugins("turnstile.graders")
"""The graders by name. An object is a class like ``ComponentGrader`` (``grading/protocol.py``)."""

MAY_NAME_CODE: Final = {"may_name_code": True}
"""The context in which text is validated that may name code of this machine: of a task file, not of a request or a
row."""

Credit = Annotated[FiniteFloat, Field(ge=0, le=1)]
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


def options_of(kind: str) -> type[GraderOptions] | None:
    """The model of a grader's options; None: no task can ask for it.

    Raises UnknownPlugin, and BrokenPlugin also for an object that is no grader.
    """
    plugin = GRADERS.find(kind)
    grader = plugin.load()
    try:
        options = grader.Options
        if options is None or issubclass(options, GraderOptions):
            found: type[GraderOptions] | None = options
            return found
    except (AttributeError, TypeError):
        pass
    raise BrokenPlugin(f"{plugin} cannot be used: its `Options` are no class derived from GraderOptions")


def _checked(entry: object, info: ValidationInfo) -> object:
    """The entry as its grader's options, where that is known. A reference in text that may name no code stays."""
    if not isinstance(entry, Mapping):
        if not isinstance(entry, GraderOptions):
            raise ValueError("write a mapping: the options of a grader")
        return entry
    kind = entry.get("grader")
    if not isinstance(kind, str) or (is_reference(kind) and not (info.context or {}).get("may_name_code")):
        return dict(entry)
    try:
        options = options_of(kind)
    except PluginError as error:
        if is_reference(kind):
            raise ValueError(str(error)) from error
        return dict(entry)  # told by grading/registry.py
    if options is None:
        return dict(entry)
    try:
        return options.of_entry(entry)
    except ValueError:  # pydantic's ValidationError is one
        raise
    except Exception as error:
        raise ValueError(f"{GRADERS.find(kind)} fails on its options: {type(error).__name__}: {error}") from error


GradingEntry: TypeAlias = Annotated[
    SerializeAsAny[InstanceOf[GraderOptions]] | dict[str, Any], BeforeValidator(_checked)
]
"""One entry of ``grading``; a dict where its grader is not known."""


def gather_graders(fields: dict[str, Any], own: Collection[str]) -> dict[str, Any]:
    """``fields`` of a task, with those that are a grader's options, by its name, among its ``grading``.

    ``own``: names of fields that are the task's own. Raises ValueError for options that are written twice.
    """
    moved = {
        name: value for name, value in fields.items() if name not in own and options_in_field(name) is not None
    }
    grading = fields.get("grading", {})
    if not moved or not isinstance(grading, Mapping):
        return fields
    kept = {name: value for name, value in fields.items() if name not in moved}
    given = {name: moved[name] for name in sorted(moved) if moved[name] is not None}
    for name in given.keys() & grading.keys():
        raise ValueError(f"`{name}` is written twice: as a field of the task, and in `grading`")
    return {**kept, "grading": {**given, **grading}}


def options_in_field(name: str) -> type[GraderOptions] | None:
    """The options that a task may write as a field ``name``; None: there is no such grader."""
    try:
        options = options_of(name)
    except PluginError:
        return None
    return options if options is not None and options.in_field else None


def name_kinds(grading: object) -> object:
    """``grading`` with ``grader`` written into each entry that is named after its grader."""
    if not isinstance(grading, Mapping):
        return grading
    for name in grading:
        if not isinstance(name, str) or not COMPONENT_NAME.fullmatch(name):
            raise ValueError(f"the name {name!r:.100} has other characters than letters, digits, `_`, `-` and `.`")
    installed = GRADERS.names()
    return {
        name: {"grader": name, **entry} if name in installed and isinstance(entry, Mapping) else entry
        for name, entry in grading.items()
    }


def kind_of(name: str, entry: GradingEntry) -> str:
    """The name of the entry's grader."""
    return entry.grader if isinstance(entry, GraderOptions) else str(entry.get("grader", name))


def host_code_of(entry: GradingEntry) -> str | None:
    """The code of the server's machine that the entry names; None: none."""
    if isinstance(entry, GraderOptions):
        return entry.host_code or (entry.grader if is_reference(entry.grader) else None)
    kind = entry.get("grader")
    return kind if isinstance(kind, str) and is_reference(kind) else None


def gives_parts(entry: GradingEntry) -> bool:
    """True if the entry's grader may give components of other names than its own."""
    return entry.parts if isinstance(entry, GraderOptions) else True


def unit_kind(entry: GradingEntry) -> bool:
    """True if the entry's component lies in [0, 1]."""
    return isinstance(entry, GraderOptions) and entry.unit and not entry.parts


def reads_work(entry: GradingEntry) -> bool:
    return entry.reads_work if isinstance(entry, GraderOptions) else True


def field_place(loc: tuple[str | int, ...]) -> tuple[str | int, ...]:
    """The path of a field as it is written, from where pydantic places an error."""
    plain = tuple(part for part in loc if part != "[key]")
    name = plain[1] if len(plain) > 1 and plain[0] == "grading" else None
    return plain[1:] if isinstance(name, str) and options_in_field(name) is not None else plain
