"""The audit of one episode: distances to the engine's own scores, and the invariants that were checked."""

from __future__ import annotations

from pydantic import Field, FiniteFloat

from turnstile.models.base import SCHEMA_VERSION, Model


class TurnAudit(Model):
    """One turn: re-scored on the engine at the turn's temperature, or skipped for a stated reason."""

    turn_id: str
    tokens: int = Field(ge=1)
    """Sampled tokens of the turn."""
    unscored: int = Field(0, ge=0)
    """Those of them that the engine did not score: all of a turn that was skipped, else the last ones of a turn
    that fills the context to within what the engine takes as one input (SGLang: 7 tokens)."""
    max_abs_delta: FiniteFloat | None = None
    """max |recorded logprob − engine's score| over the tokens that were scored, in nats; None when the turn was
    skipped."""
    skipped: str | None = None
    """Why the turn could not be re-scored: ``constrained``, ``other_weights``, ``given``,
    ``engine_cannot_score``, ``too_long_to_score``."""


class InvariantCheck(Model):
    """One invariant over the whole episode. It holds when ``failures`` is empty."""

    name: str
    failures: tuple[str, ...] = ()

    @property
    def passed(self) -> bool:
        return not self.failures


class AuditReport(Model):
    """Answer to ``POST /episodes/{id}/audit``.

    ``passed``: every invariant holds and no distance exceeds ``tolerance`` (nats). Skipped turns do not fail an
    audit; they are listed, because they were not checked.
    """

    schema_version: int = SCHEMA_VERSION
    episode_id: str
    turns: tuple[TurnAudit, ...]
    invariants: tuple[InvariantCheck, ...]
    max_abs_delta: FiniteFloat | None
    """The largest distance of all turns; None when no turn was scored."""
    tolerance: float = Field(gt=0)
    passed: bool
