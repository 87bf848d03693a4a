"""The base of all parts of a task, for modules that the task itself imports."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class TaskPart(BaseModel):
    """A part of a task; unknown fields are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True)
