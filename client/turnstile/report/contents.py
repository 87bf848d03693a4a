"""The contents of a report, whatever their source, and the bounds on how much is shown."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from turnstile.models import BreakEntry, Episode, EpisodeSummary, TurnOutline

EPISODES = 10
"""Episodes that are shown whole, unless another number is asked for."""
TOKENS = 1000
"""Tokens that are shown of an episode: of a longer path the first and the last half of so many."""
MOST_TURNS = 40
"""Turns of a conversation: of a longer one the first and the last half of so many."""
MOST_CHARACTERS = 2000
"""Characters of one text of a message."""
MOST_BREAKS = 20
"""Breaks of one episode whose messages are shown."""
MOST_ROWS = 200
"""Rows of one table."""
MOST_POINTS = 500
"""Points of one curve: of more, evenly chosen ones and the last."""
MOST_BUCKETS = 48
"""Intervals of time of a curve by time."""


@dataclass(frozen=True, slots=True)
class TokenPiece:
    """Consecutive tokens of a path, the first at position ``start``. All tuples have one entry for each."""

    start: int
    ids: tuple[int, ...]
    text: tuple[str, ...] | None
    """None where no tokenizer was there to say it: the ids are shown."""
    special: tuple[bool, ...]
    loss_mask: tuple[int, ...]
    logprobs: tuple[float | None, ...]
    """None where the policy did not sample the token."""
    versions: tuple[str | None, ...]
    """Weight versions, None in the same places."""


@dataclass(frozen=True, slots=True)
class ShownEpisode:
    """One episode with its conversation and its tokens, as far as they were there and fit the bounds."""

    reason: str
    """The reason for choosing it, in a word: ``best``, ``failed``, …"""
    episode: Episode
    summary: EpisodeSummary
    turns: tuple[TurnOutline, ...] = ()
    """The first and the last ones; ``all_turns`` counts them."""
    all_turns: int = 0
    breaks: tuple[BreakEntry, ...] = ()
    tokens: tuple[TokenPiece, ...] = ()
    all_tokens: int = 0
    """Number of tokens on the path that ``tokens`` are of."""
    missing: tuple[str, ...] = ()
    """Sentences: what could not be shown, and why."""


@dataclass(frozen=True, slots=True)
class RunReport:
    """A run as a report shows it."""

    name: str
    source: str
    """The origin of the records, in words."""
    summaries: tuple[EpisodeSummary, ...]
    shown: tuple[ShownEpisode, ...]
    made_at: float
    """Unix time."""
    client_version: str
    facts: Mapping[str, str] = field(default_factory=dict)
    """Further facts on what was run: the servers' version, their models."""
    never_begun: int = 0
    """Rollouts that no server took: they have no episode, and are in no figure."""
    solved_at: float = 1.0
    """The least reward that counts as solved."""


def ends_of(count: int, most: int) -> tuple[tuple[int, int], ...]:
    """Ranges ``[start, end)`` of what is shown of ``count`` things: all of them, or the first and the last half of
    ``most``."""
    if count <= most:
        return ((0, count),) if count else ()
    last = most // 2
    return tuple(each for each in ((0, most - last), (count - last, count)) if each[0] < each[1])
