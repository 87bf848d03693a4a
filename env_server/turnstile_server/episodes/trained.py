"""The record of an episode that a training step took: its step, and the age of its tokens then. Pure."""

from __future__ import annotations

from turnstile.models import Episode, Trained, TrainedRequest
from turnstile_server.engines.versions import WeightVersions
from turnstile_server.errors import Unprocessable


def with_step(episode: Episode, told: TrainedRequest, versions: WeightVersions, *, now: float) -> Episode:
    """The record with the step; the same object where the same was told before. Raises Unprocessable for weights
    that were never served here."""
    name, behind = _trained_weights(told.version, versions)
    before = episode.trained
    repeated = before is not None and (before.step, before.used) == (told.step, told.used)
    if before is not None and repeated and told.version in (None, before.version):
        return episode
    ages = [
        (max(0, age - behind), tokens)
        for version, tokens in episode.stats.weight_versions.items()
        if (age := versions.lag(version)) is not None and tokens
    ]
    of = sum(tokens for _, tokens in ages)
    known = of == sum(episode.stats.weight_versions.values()) > 0
    trained = Trained(
        step=told.step,
        used=told.used,
        at=now,
        version=name,
        lag=sum(age * tokens for age, tokens in ages) / of if known else None,
        oldest=max(age for age, _ in ages) if known else None,
    )
    return episode.model_copy(update={"trained": trained, "train_step": told.step})


def _trained_weights(name: str | None, versions: WeightVersions) -> tuple[str | None, int]:
    """The name of the weights that a step trains, and how many were served since."""
    current = versions.current
    if name is None:
        return None if current is None else current.name, 0
    behind = versions.lag(name)
    if behind is None:
        newest = "none were" if current is None else f"the newest are {current.name!r}"
        raise Unprocessable(f"version: the weights {name!r} were never served here; {newest}")
    return name, behind
