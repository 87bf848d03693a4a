"""Possible causes of a distance between recorded and re-scored logprobs: the engine's own settings, in plain
words. Pure.

The settings come from ``EngineCapabilities.details``: those that SGLang reports in ``/server_info``, vLLM on its
command line, under the engine's own names. A name that is not known here explains nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from turnstile.models import VersionAudit

_NOTHING: Final = frozenset({"", "none", "null", "off", "false", "no", "0"})
_WHOLE: Final = frozenset({"float32", "float", "fp32", "torch.float32"})
PREFIX_DISTANCE: Final = 1e-3
"""Nats that a reused prefix changes at most, generously."""
_SAME_AS_MODEL: Final = frozenset({"auto", "model"})


@dataclass(frozen=True, slots=True)
class _Cause:
    """``names``: the settings that show it; ``holds``: whether a value of one does; ``text``: has ``{name}`` and
    ``{value}``."""

    names: tuple[str, ...]
    holds: Callable[[str], bool]
    text: str
    largest: float = math.inf
    """Nats that it explains at most."""


def _set(value: str) -> bool:
    return value.lower() not in _NOTHING


def _not_set(value: str) -> bool:
    return not _set(value)


_CAUSES: Final = (
    _Cause(
        ("dtype",),
        lambda value: value.lower() not in _WHOLE and value.lower() not in _NOTHING,
        "{name} is {value}, not float32: such an engine gives other logprobs for one token alone, in a batch and"
        " in a prefill. In bfloat16 0.04 nats on average and up to 0.25 were measured for a small model.",
    ),
    _Cause(
        ("kv_cache_dtype", "cache_dtype"),
        lambda value: value.lower() not in _WHOLE | _SAME_AS_MODEL and value.lower() not in _NOTHING,
        "{name} is {value}: the attention cache is rounded, so what is decoded on it differs from what a prefill"
        " gives.",
    ),
    _Cause(
        ("quantization",),
        _set,
        "{name} is {value}: the weights are rounded, and kernels for decoding and for prefill round differently.",
    ),
    _Cause(
        ("speculative_algorithm", "speculative_config", "speculative_decoding"),
        _set,
        "{name} is {value}: with speculative decoding the target model verifies several tokens at once, in "
        "batches of other shapes than when it scores them.",
    ),
    _Cause(
        ("disable_radix_cache",),
        _not_set,
        "The prefix cache is on ({name} is {value}): a reused prefix was computed in other batches than a fresh "
        "one. In float32 that is about 4e-6 nats, and 1e-4 at a few tokens of some policies.",
        largest=PREFIX_DISTANCE,
    ),
    _Cause(
        ("enable_prefix_caching", "prefix_caching", "prefix_cache"),
        _set,
        "The prefix cache is on ({name} is {value}): a reused prefix was computed in other batches than a fresh "
        "one. In float32 that is about 4e-6 nats, and 1e-4 at a few tokens of some policies.",
        largest=PREFIX_DISTANCE,
    ),
)

STALE: Final = (
    "{tokens} tokens were sampled on an attention cache of older weights (stale_kv), which no forward pass of "
    "one version repeats: they are up to {distance:.2g} nats apart, are reported apart and fail nothing. Pause "
    "with retract to have none."
)
UNEXPLAINED: Final = (
    "No setting that the engine reports explains the distance of {distance:.2g} nats: look for weights that were"
    " loaded under a name that named others, for a prefix cache that was not flushed at an update, and for a "
    "proxy that changes requests."
)


def explain(versions: Sequence[VersionAudit], details: Mapping[str, str], tolerance: float) -> tuple[str, ...]:
    """Sentences on what may explain the distances above ``tolerance`` (nats); none where none is above."""
    sentences = []
    own = [found.max_abs_delta for found in versions if found.max_abs_delta is not None]
    if own and max(own) > tolerance:
        found = [
            cause.text.format(name=name, value=details[name])
            for cause in _CAUSES
            for name in cause.names
            if max(own) <= cause.largest and name in details and cause.holds(details[name])
        ]
        sentences += found or [UNEXPLAINED.format(distance=max(own))]
    stale = [found.stale_max_abs_delta for found in versions if found.stale_max_abs_delta is not None]
    if stale and max(stale) > tolerance:
        tokens = sum(found.stale_tokens for found in versions)
        sentences.append(STALE.format(tokens=tokens, distance=max(stale)))
    return tuple(sentences)
