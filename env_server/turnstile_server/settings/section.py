"""The base of every group of settings, and the ranges that several of them share."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from turnstile.models.base import MAX_INT64, MAX_SECONDS

Port = Annotated[int, Field(ge=0, le=65535)]
"""A TCP port; 0 takes a free one."""

CountCeiling = Annotated[int, Field(ge=1, le=MAX_INT64)]
"""The ceiling of a count in an episode's limits. Whatever it allows can be written into the episode's record."""

SecondsCeiling = Annotated[float, Field(gt=0, le=MAX_SECONDS)]
"""The ceiling of a time in an episode's limits. 1e9 (31 years) stands for none; infinity has no JSON."""


class Section(BaseModel):
    """One group of settings: immutable, unknown names refused."""

    model_config = ConfigDict(extra="forbid", frozen=True)
