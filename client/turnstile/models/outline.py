"""An episode's turns without their tokens, and its breaks with their messages: for people to read."""

from __future__ import annotations

from turnstile.models.base import Model
from turnstile.models.messages import Message
from turnstile.models.sample import Cause, SampleKind
from turnstile.models.turn import BreakAt, BreakReason, Turn, TurnFacts


class TurnOutline(TurnFacts):
    """A turn with the numbers of its tokens in place of the tokens."""

    context_tokens: int
    completion_tokens: int
    mean_logprob: float | None
    """Mean of the completion's logprobs; None for a text that was given."""
    start: int
    """Position of its first sampled token on the path from the root."""
    untrained_reason: str | None
    """The reason that no sample trains it, as in ``untrained`` of the samples; None: one does."""


class RootOutline(Model):
    """The kind and the cause of a conversation that begins with a turn without a parent (``docs/matching.md``)."""

    turn_id: str
    kind: SampleKind
    caused_by: Cause | None = None
    """The turn that brought it about; None for the main one, and where it is not known."""


class TurnOutlines(Model):
    """Answer to ``GET /episodes/{id}/turns?arrays=false``, in commit order. Turns that a fork continues are not
    among them: they are the other episode's."""

    turns: tuple[TurnOutline, ...]
    roots: tuple[RootOutline, ...] = ()


class TurnList(Model):
    """Answer to ``GET /episodes/{id}/turns``, in commit order."""

    turns: tuple[Turn, ...]


class BreakEntry(Model):
    """A turn that left a known path, and the first place where its call differs from what was known."""

    turn_id: str
    seq: int
    reason: BreakReason
    at: BreakAt | None = None
    continues: str | None = None
    """As in ``Break``."""
    known_turn_id: str | None = None
    """The turn whose path the call agrees with for longest; None where none has the place."""
    known: Message | None = None
    """The message there; None where that path ends before it."""
    incoming: Message | None = None
    """The message that the call has in its place; None where the call ends before it (``history_truncated``), and
    where the break has no place."""


class BreakReport(Model):
    """Answer to ``GET /episodes/{id}/breaks``: in commit order, from ``offset`` on."""

    episode_id: str
    total: int
    """Breaks of the whole episode."""
    offset: int
    breaks: tuple[BreakEntry, ...]
