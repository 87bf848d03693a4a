"""Checks of a call to a server and of its answer, whichever engine it is. Pure."""

from __future__ import annotations

from turnstile.models import Int32Array
from turnstile_server.errors import EngineProtocolError, EngineRefused


def check_input(input_ids: Int32Array, vocab_size: int) -> None:
    """Raises EngineRefused for what is no prompt: ids outside the vocabulary are never sent."""
    if input_ids.ndim != 1 or input_ids.dtype.kind != "i" or len(input_ids) == 0:
        raise EngineRefused("input_ids must be a non-empty one-dimensional array of whole numbers.")
    check_ids(input_ids, vocab_size)


def check_ids(ids: Int32Array, vocab_size: int) -> None:
    """Raises EngineRefused for ids (int[n]) outside the vocabulary."""
    if len(ids) == 0:
        return
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= vocab_size:
        outside = low if low < 0 else high
        raise EngineRefused(f"Token id {outside} is outside the vocabulary of {vocab_size}.")


def check_output(ids: Int32Array, vocab_size: int) -> None:
    """Raises EngineProtocolError for sampled ids outside the vocabulary."""
    if len(ids) and int(ids.max()) >= vocab_size:
        raise outside_vocabulary(int(ids.max()), vocab_size)


def outside_vocabulary(sampled: int, vocab_size: int) -> EngineProtocolError:
    return EngineProtocolError(f"The engine sampled id {sampled}, outside the vocabulary of {vocab_size}.")


def check_start(input_ids: Int32Array, start: int) -> None:
    """Raises ValueError for a first id to score that has none before it, or is past the end."""
    if not 1 <= start <= len(input_ids):
        raise ValueError(f"start is {start} for {len(input_ids)} ids")
