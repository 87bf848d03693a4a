"""The parts of a manifest's ``validation:`` block that a task set can be held to."""

from __future__ import annotations

from pathlib import Path
from typing import Self

import yaml
from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, ValidationError, model_validator

from turnstile.models.faults import fault_text
from turnstile_server.errors import StartupError

LEAST_MARGIN = 0.1
"""The least ``floor_margin`` that OpenEnv's policy lets a manifest declare."""


class DeclaredReward(BaseModel):
    """``validation.reward``: the range, and how near to its ends a reward counts as there."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    range: tuple[FiniteFloat, FiniteFloat] | None = None
    oracle_tolerance: FiniteFloat = Field(0.0, ge=0)
    floor_margin: FiniteFloat = Field(LEAST_MARGIN, ge=0)
    variance_tolerance: FiniteFloat = Field(0.0, ge=0)

    @model_validator(mode="after")
    def _increasing(self) -> Self:
        if self.range is not None and not self.range[0] < self.range[1]:
            raise ValueError(f"range must increase, and is {list(self.range)}")
        return self


class DeclaredCapabilities(BaseModel):
    """``validation.capabilities``: the tools and the number of tasks of each split."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    declared_tools: tuple[str, ...] = ()
    declared_task_count: dict[str, int] = Field(default_factory=dict)


class Declarations(BaseModel):
    """What a manifest promises; the defaults are for a set without one."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    reward: DeclaredReward = DeclaredReward()
    capabilities: DeclaredCapabilities = DeclaredCapabilities()


def read_declarations(manifest: Path) -> Declarations:
    """Raises StartupError for a file that cannot be read, or has no ``validation:`` block, or a wrong one."""
    try:
        found = yaml.safe_load(manifest.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise StartupError(f"--manifest: {manifest} cannot be read: {error}") from error
    block = found.get("validation") if isinstance(found, dict) else None
    if not isinstance(block, dict):
        raise StartupError(f"--manifest: {manifest} has no `validation:` block")
    try:
        return Declarations.model_validate(block)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(map(str, first["loc"]))
        raise StartupError(f"--manifest: {manifest}: validation.{place}: {fault_text(first)}") from error
