"""The base of every group of settings."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """One group of settings: immutable, unknown names refused."""

    model_config = ConfigDict(extra="forbid", frozen=True)
