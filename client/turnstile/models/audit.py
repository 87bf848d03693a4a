"""The audit of one episode: distances to the engine's own scores, and the invariants that were checked."""

from __future__ import annotations

from pydantic import Field, FiniteFloat

from turnstile.models.base import SCHEMA_VERSION, Model


class TurnAudit(Model):
    """One turn: re-scored on the engine at the turn's temperature, or skipped for a stated reason.

    Every sampled token is compared, compared apart (``stale``) or not compared (``unscored``): a turn that was
    sampled by several weight versions is compared where the engine's current version sampled it.
    """

    turn_id: str
    tokens: int = Field(ge=1)
    """Sampled tokens of the turn."""
    unscored: int = Field(0, ge=0)
    """Those of them that were not compared: all of a turn that was skipped, those of ``other_weights``, and the
    last ones of a turn that fills the context to within what the engine takes as one input (SGLang: 7 tokens)."""
    other_weights: int = Field(0, ge=0)
    """Those of ``unscored`` that other weights sampled than those the engine serves now."""
    max_abs_delta: FiniteFloat | None = None
    """max |recorded logprob − engine's score| over the tokens that were compared, ``stale`` ones apart, in nats;
    None when there are none."""
    stale: int = Field(0, ge=0)
    """Tokens that were sampled on an attention cache of older weights (``stale_kv``), compared apart."""
    stale_max_abs_delta: FiniteFloat | None = None
    """Their largest distance; None when ``stale`` is 0."""
    skipped: str | None = None
    """The reason that nothing of the turn was re-scored: ``constrained``, ``other_weights``, ``adapter``,
    ``given``, ``engine_cannot_score``, ``too_long_to_score``, ``weights_changed`` (the engine got other weights
    meanwhile)."""


class VersionAudit(Model):
    """The tokens that one weight version sampled in the episode, and their distance from the engine's scores, in
    nats.

    A version that the engine does not serve now has no distances: its tokens can be compared only while it is
    served.
    """

    version: str
    tokens: int = Field(ge=0)
    """Tokens that it sampled."""
    compared: int = Field(0, ge=0)
    """Those of them that were compared, ``stale_tokens`` apart."""
    max_abs_delta: FiniteFloat | None = None
    mean_abs_delta: FiniteFloat | None = None
    p99_abs_delta: FiniteFloat | None = None
    """99 of 100 compared tokens are at most so far apart."""
    stale_tokens: int = Field(0, ge=0)
    """Those that were compared apart: sampled on an attention cache of older weights."""
    stale_max_abs_delta: FiniteFloat | None = None


class InvariantCheck(Model):
    """One invariant over the whole episode. It holds when ``failures`` is empty."""

    name: str
    failures: tuple[str, ...] = ()

    @property
    def passed(self) -> bool:
        return not self.failures


class AuditReport(Model):
    """Answer to ``POST /episodes/{id}/audit``.

    ``passed``: every invariant holds and no distance exceeds ``tolerance`` (nats). Skipped turns and stale tokens
    do not fail an audit; they are listed, because they were not checked.
    """

    schema_version: int = SCHEMA_VERSION
    episode_id: str
    turns: tuple[TurnAudit, ...]
    versions: tuple[VersionAudit, ...] = ()
    """By weight version, in the order in which they came."""
    invariants: tuple[InvariantCheck, ...]
    max_abs_delta: FiniteFloat | None
    """The largest distance of all turns, stale tokens apart; None when no token was compared."""
    tolerance: float = Field(gt=0)
    passed: bool
    engine: dict[str, str] = Field(default_factory=dict)
    """The engine's settings that explain its numbers, by name, as far as it says them."""
    explanations: tuple[str, ...] = ()
    """Possible explanations of a distance above ``tolerance``, in sentences."""
