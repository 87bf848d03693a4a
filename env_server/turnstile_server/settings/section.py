"""The base of every group of settings, the bounds that are no settings, and the ranges that several groups share.

A setting is a number that an operator would change: it depends on the machine, the model or the tasks. Every other
bound is a constant beside its use: a field of a frozen dataclass in the package that reads it, with a sentence of
meaning. Such a dataclass is derived from ``Bounds`` and read by ``settings.bounds_of(GateBounds).trim_s``.

Code, and only code, can give a section other bounds: ``GateSettings(bounds=(GateBounds(trim_s=0.1),))``. Tests
need that, for a whole server too, which is built from nothing but its settings. The dataclasses stand in the
packages above this one, and no file, variable or flag can hold an instance of one, so none of them can set a
bound.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, SkipValidation
from pydantic_core import PydanticKnownError

from turnstile.models.base import MAX_INT64, MAX_SECONDS

Port = Annotated[int, Field(ge=0, le=65535)]
"""A TCP port; 0 takes a free one."""

CountCeiling = Annotated[int, Field(ge=1, le=MAX_INT64)]
"""The ceiling of a count in an episode's limits. Whatever it allows can be written into the episode's record."""

SecondsCeiling = Annotated[float, Field(gt=0, le=MAX_SECONDS)]
"""The ceiling of a time in an episode's limits. 1e9 (31 years) stands for none; infinity has no JSON."""


@dataclass(frozen=True)
class Bounds:
    """The bounds of one part that are constants: a dataclass of numbers, each with its default."""


BoundsT = TypeVar("BoundsT", bound=Bounds)


def _of_code(value: object) -> object:
    if isinstance(value, tuple) and all(isinstance(each, Bounds) for each in value):
        return value
    raise PydanticKnownError("extra_forbidden")


class Section(BaseModel):
    """One group of settings: immutable, unknown names refused."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class BoundedSection(Section):
    """A group of settings of parts that have constants too."""

    bounds: Annotated[tuple[SkipValidation[Bounds], ...], BeforeValidator(_of_code)] = Field(
        (), exclude=True, repr=False
    )
    """Bounds in place of the constants, one of a class. It is no setting: only code can give it."""

    def bounds_of(self, part: type[BoundsT], /) -> BoundsT:
        """The bounds of ``part``: those that code gave this section, else the constants."""
        return next((each for each in self.bounds if isinstance(each, part)), None) or part()
