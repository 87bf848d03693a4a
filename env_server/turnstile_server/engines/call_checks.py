"""Checks of a call to a server and of its answer, whichever engine it is. Pure."""

from __future__ import annotations

import math
from typing import Final, get_args

import numpy as np

from turnstile.models import FinishReason, Int32Array
from turnstile_server.engines.protocol import ABOVE_ZERO, EngineChunk
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


def check_chunk(chunk: EngineChunk, vocab_size: int, total: int) -> None:
    """Raises EngineProtocolError for numbers that no model gives, before any of them is kept (invariant 4).

    ``total``: tokens of the call so far, with those of ``chunk``. SGLang's and vLLM's clients refuse most of it as
    they read; this holds every engine to it.
    """
    ids, logprobs = chunk.ids, chunk.logprobs
    if len(logprobs) != len(ids):
        raise EngineProtocolError(f"the engine gave {len(logprobs)} logprobs for {len(ids)} tokens")
    if len(ids):
        # A NaN is in no range, and a negative id is a large one without its sign: two reductions for each array.
        if not (-math.inf < logprobs.min() and logprobs.max() <= ABOVE_ZERO):
            finite = bool(np.isfinite(logprobs).all())
            raise EngineProtocolError(f"the engine gave a logprob that is {'above 0' if finite else 'not finite'}")
        if int(ids.view(np.uint32).max()) >= vocab_size:
            raise outside_vocabulary(int(ids.min()) if ids.min() < 0 else int(ids.max()), vocab_size)
    if chunk.finish is None:
        return
    if chunk.finish.reason not in _FINISH_REASONS:
        raise EngineProtocolError(f"the engine finished a call by {chunk.finish.reason!r:.40}")
    spans = chunk.finish.weight_spans
    if spans and spans[-1].end > total:
        raise EngineProtocolError(f"the engine named the weights of {spans[-1].end} tokens and gave {total}")


def check_start(input_ids: Int32Array, start: int) -> None:
    """Raises ValueError for a first id to score that has none before it, or is past the end."""
    if not 1 <= start <= len(input_ids):
        raise ValueError(f"start is {start} for {len(input_ids)} ids")
