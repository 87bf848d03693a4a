"""Limits of an episode: what the trainer asked for under the server's ceilings. More is refused, not cut."""

from __future__ import annotations

from typing import Any

from turnstile.models import Limits
from turnstile_server.errors import Unprocessable
from turnstile_server.gate.session import CallLimits
from turnstile_server.settings import EpisodeSettings, GateSettings


def resolve_limits(asked: Limits, ceilings: EpisodeSettings) -> Limits:
    """Every field a number. Raises Unprocessable, naming the field and its ceiling."""
    resolved: dict[str, Any] = {}
    bounds = ceilings.model_dump()
    for name, wanted in asked.model_dump().items():
        ceiling = bounds[name]
        if wanted is not None and wanted > ceiling:
            raise Unprocessable(
                f"limits.{name} is {wanted}, above this server's ceiling of {ceiling} (episodes.{name})"
            )
        resolved[name] = ceiling if wanted is None else wanted
    return Limits(**resolved)


def call_limits(limits: Limits, gate: GateSettings) -> CallLimits:
    """What the gate enforces, from limits that ``resolve_limits`` has resolved."""
    assert limits.max_turns is not None
    assert limits.max_completion_tokens is not None
    assert limits.max_sampled_tokens is not None
    return CallLimits(
        max_turns=limits.max_turns,
        max_completion_tokens=limits.max_completion_tokens,
        max_sampled_tokens=limits.max_sampled_tokens,
        max_calls=gate.max_calls_per_episode,
        max_refusals=gate.max_refusals,
    )
