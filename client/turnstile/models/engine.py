"""The engine as the control door shows it."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from turnstile.models.turn import Model

PauseMode = Literal["abort", "retract", "in_place"]
"""What a pause does with calls in flight: end them with what they have, queue them again, or hold them."""


class EngineInfo(Model):
    """Answer to ``GET /engine`` and to the engine's control calls."""

    ok: bool
    """The engine answers."""
    weight_version: str | None
    paused: bool | None
    detail: str = ""
    model_name: str
    context_length: int
    """In tokens: the longest prompt plus completion."""
    vocab_size: int


class PauseRequest(Model):
    """Body of ``POST /engine/pause``. ``retract`` loses nothing and is exact across a weight update."""

    mode: PauseMode = "retract"


class WeightsRequest(Model):
    """Body of ``POST /engine/weights``: a folder that the engine can read, and the name of these weights."""

    path: str = Field(min_length=1)
    version: str = Field(min_length=1, max_length=256)
