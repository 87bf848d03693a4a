"""The training step that took an episode: a trainer tells it with ``client.trained``.

An episode that was told of belongs to that step, whatever step it began at. Its lag is the age of its tokens then.
"""

from __future__ import annotations

from pydantic import Field

from turnstile.models.base import MAX_INT64, Model


class TrainedRequest(Model):
    """Body of ``POST /episodes/{id}/trained``."""

    step: int = Field(ge=0, le=MAX_INT64, description="The trainer's own counter of steps.")
    used: bool = Field(
        default=True,
        description="False: the step took the episode and trained none of it (a group without signal, too old).",
    )
    version: str | None = Field(
        default=None,
        min_length=1,
        max_length=256,
        description="Name of the weights that the step trains; None: those that are served now.",
    )


class Trained(Model):
    """The step that took the episode, as it was told last.

    ``lag``: mean age of its sampled tokens then, in weight versions: how many were served from the one that
    sampled a token to ``version``. ``oldest``: age of the oldest. Both are None where nothing was sampled, or the
    server does not know the order of the versions.
    """

    step: int
    used: bool
    at: float
    """Unix time."""
    version: str | None
    lag: float | None
    oldest: int | None
