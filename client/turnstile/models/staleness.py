"""Staleness: how many weight versions were served after the weights that sampled an episode's first token.

A trainer that goes on while episodes run trains on tokens of older weights. It may bound how old they get.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from turnstile.models.base import MAX_INT32, Model

StalenessScope = Literal["episode", "group"]
StalenessPolicy = Literal["cancel", "finish", "stop_admitting"]


class StalenessBound(Model):
    """The bound on how stale an episode may get, and what happens beyond it."""

    max_versions: int = Field(
        ge=0, le=MAX_INT32, description="Weight versions served since the first sampled token, at most."
    )
    scope: StalenessScope = Field(
        default="episode",
        description="`episode`: counted from its first sampled token. `group`: from the first one of all "
        "episodes of its group.",
    )
    policy: StalenessPolicy = Field(
        default="cancel",
        description="`cancel`: the episode is cancelled (`stale_weights`). `finish`: it goes on and is marked. "
        "`stop_admitting`: it takes no more model calls and is graded with what it has, and its group gets no "
        "further episode.",
    )


class Staleness(Model):
    """The staleness of an episode (now, or when it ended), and its bound.

    ``first_version``: the oldest weights that sampled a token of the episode; of its group, where the bound is for
    the group. ``newest_version``: the weights that were served last. ``versions``: how many versions later that
    is. All three are None before anything was sampled; ``versions`` also where this server never served
    ``first_version``. ``exceeded``: ``versions`` is, or was, above the bound.
    """

    bound: StalenessBound | None = None
    first_version: str | None = None
    newest_version: str | None = None
    versions: int | None = None
    exceeded: bool = False
