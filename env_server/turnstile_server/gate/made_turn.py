"""A turn of what the gate made itself, without pydantic's validation of each field.

The fields come from typed code: strings, models and tuples that were made or validated before. So only what they
say together is checked (``Turn``'s own check of lengths, finite numbers and weight spans), and the arrays are
frozen. The result equals ``Turn(**fields)`` in every field and in its stored bytes
(``tests/gate/test_made_turn.py``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar, cast

import numpy as np

from turnstile.models import SCHEMA_VERSION, Turn, TurnTimings
from turnstile.models.arrays import frozen_array

Made = TypeVar("Made", Turn, TurnTimings)

_VERSION = {"schema_version": SCHEMA_VERSION}
_TURN_FIELDS, _TIMES = tuple(Turn.model_fields), tuple(TurnTimings.model_fields)
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
    values = {
        **_VERSION,
        **fields,
        "break_": fields["break"],
        "context_ids": frozen_array(fields["context_ids"], np.int32),
        "completion_ids": frozen_array(fields["completion_ids"], np.int32),
        "logprobs": frozen_array(fields["logprobs"], np.float32),
    }
    turn = _made(Turn, values, _TURN_FIELDS, _GIVEN)
    cast(Any, turn)._check()  # a plain method, which the decorator hides from type checkers
    return turn


def made_timings(**fields: Any) -> TurnTimings:
    """``fields``: all of ``TurnTimings``."""
    return _made(TurnTimings, fields, _TIMES, _TIMED)


def _made(kind: type[Made], values: Mapping[str, Any], order: Sequence[str], given: set[str]) -> Made:
    """As ``model_construct``, which looks at each field for an alias and a default: here all values are given, by
    name. ``order``: the names of all fields, in which pydantic writes them."""
    model = kind.__new__(kind)
    object.__setattr__(model, "__dict__", {name: values[name] for name in order})
    object.__setattr__(model, "__pydantic_fields_set__", given)
    object.__setattr__(model, "__pydantic_extra__", None)
    object.__setattr__(model, "__pydantic_private__", None)
    return model
