"""A turn of what the gate made itself, without pydantic's validation of each field.

The fields come from typed code: strings, models and tuples that were made or validated before. So only what they
say together is checked (``Turn``'s own check of lengths, finite numbers and weight spans), and the arrays are
frozen. The result equals ``Turn(**fields)`` in every field and in its stored bytes
(``tests/gate/test_made_turn.py``).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import numpy as np

from turnstile.models import Turn, TurnTimings
from turnstile.models.arrays import frozen_array

_GIVEN = set(Turn.model_fields) - {"schema_version"}
_TIMED = set(TurnTimings.model_fields)
"""The names that are given, one set for all turns: pydantic keeps one of its own for each, 2 KB in a turn of 1
KB of text. Nothing changes them, because the models are frozen."""


def made_turn(fields: Mapping[str, Any]) -> Turn:
    """``fields``: all of ``Turn`` but its version, by name or alias, each in the type that a validated turn has;
    arrays of their dtype, of one dimension, writable or not. Those of experts are validated in full: they are as
    the engine sent them.

    Raises ValueError (pydantic's ValidationError is one) where the fields contradict each other.
    """
    if fields.get("routed_experts") is not None:
        return Turn(**fields)
    turn = Turn.model_construct(
        _GIVEN,
        **{
            **fields,
            "context_ids": frozen_array(fields["context_ids"], np.int32),
            "completion_ids": frozen_array(fields["completion_ids"], np.int32),
            "logprobs": frozen_array(fields["logprobs"], np.float32),
        },
    )
    cast(Any, turn)._check()  # a plain method, which the decorator hides from type checkers
    return turn


def made_timings(**fields: Any) -> TurnTimings:
    """``fields``: all of ``TurnTimings``."""
    return TurnTimings.model_construct(_TIMED, **fields)
