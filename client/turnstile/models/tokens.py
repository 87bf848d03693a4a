"""Tokens of a turn's path for people to read: windows of them with their text, and where something is found."""

from __future__ import annotations

from turnstile.models.base import Model


class WindowTurn(Model):
    """The position of one turn on the path: context ``[context_start, start)``, completion ``[start, end)``, in
    tokens from the path's beginning."""

    turn_id: str
    seq: int
    context_start: int
    start: int
    end: int
    trained: bool
    """The window's loss mask is 1 on its completion, but for ids without a token."""
    trained_tokens: int
    """Tokens of the completion on which the mask is 1."""
    trained_in: str | None = None
    """The id of the sample that trains it; None: no sample does."""
    untrained_reason: str | None = None
    """The reason that the mask is 0: one of ``SampleSet.untrained``; ``other_sample``: ``trained_in`` trains it;
    ``inherited``: it was sampled in the episode that this one was forked from."""


class TokenWindow(Model):
    """Answer to ``GET /turns/{id}/tokens``: the tokens ``[start, start + n)`` of the path from the root to the end
    of a turn. ``ids`` to ``turn`` have n entries each.

    The mask is that of the sample that ends at the turn. At a turn that others continue no sample ends: the mask
    is 1 there on whatever any sample trains.
    """

    episode_id: str
    turn_id: str
    sample_id: str | None
    """The sample that ends at the turn; None where others continue it."""
    total: int
    """Tokens of the whole path."""
    start: int
    ids: tuple[int, ...]
    text: tuple[str, ...]
    """Each token's bytes as text, U+FFFD for what is only a part of a character."""
    bytes: tuple[str, ...]
    """The exact bytes in hex: those of all tokens, one after the other, are the text. Empty for an id that the
    tokenizer does not have."""
    special: tuple[bool, ...]
    """It is no ordinary text, but a token that was added to the vocabulary, such as the end of a turn."""
    tokenizer: bool = True
    """False: the directory of a stopped server is read without its tokenizer. Then all of ``bytes`` and ``text``
    are empty, and none is ``special``."""
    loss_mask: tuple[int, ...]
    logprobs: tuple[float | None, ...]
    """Also of completions that are not trained; None where the policy did not sample the token."""
    weight_version: tuple[int | None, ...]
    """Index into ``weight_version_names``; None where the policy did not sample the token."""
    weight_version_names: tuple[str, ...]
    turn: tuple[int, ...]
    """Index into ``turns``: whose context or completion the token is."""
    turns: tuple[WindowTurn, ...]
    """All turns of the path, the root first, whatever the window is."""


class TokenMatch(Model):
    """The tokens ``[start, end)`` hold one occurrence."""

    start: int
    end: int


class TokenMatches(Model):
    """Answer to ``GET /turns/{id}/tokens/find``: occurrences in the order of the path."""

    episode_id: str
    turn_id: str
    total: int
    """Tokens of the whole path."""
    matches: tuple[TokenMatch, ...]
    more: bool
    """There are further ones: ask again with ``after`` = the last one's ``start``."""
