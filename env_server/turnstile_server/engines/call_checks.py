"""Checks of a call to a server and of its answer, whichever engine it is. Pure."""

from __future__ import annotations

from typing import Final, get_args

from turnstile.models import FinishReason, Float32Array, Int32Array
from turnstile_server.engines.protocol import ABOVE_ZERO, EngineFinish
from turnstile_server.errors import EngineProtocolError, EngineRefused

_FINISH_REASONS: Final = get_args(FinishReason)


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


def check_sampled(
    ids: Int32Array, logprobs: Float32Array, vocab_size: int, finish_reason: str, finish: EngineFinish | None
) -> None:
    """Raises EngineProtocolError for numbers that no model gives: a whole completion, int32[n] and float32[n].

    The clients of SGLang and vLLM refuse them as they come; this holds every engine to it. ``finish`` None: the
    completion was cut before the engine finished it.
    """
    if finish_reason not in _FINISH_REASONS:
        raise EngineProtocolError(f"The engine finished a call by {finish_reason!r:.40}.")
    if not len(ids):
        return
    if int(ids.min()) < 0:
        raise outside_vocabulary(int(ids.min()), vocab_size)
    check_output(ids, vocab_size)
    if (most := float(logprobs.max())) > ABOVE_ZERO:
        raise EngineProtocolError(f"The engine gave the logprob {most:g}, which is above 0.")
    spans = () if finish is None else finish.weight_spans
    if spans and spans[-1].end > len(ids):
        raise EngineProtocolError(f"The engine named the weights of {spans[-1].end} tokens and gave {len(ids)}.")


def check_start(input_ids: Int32Array, start: int) -> None:
    """Raises ValueError for a first id to score that has none before it, or is past the end."""
    if not 1 <= start <= len(input_ids):
        raise ValueError(f"start is {start} for {len(input_ids)} ids")
