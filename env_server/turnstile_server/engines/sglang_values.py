"""The single values of an SGLang reply: ids, logprobs and names of weights, each checked. Pure.

What must hold: a value that cannot be recorded as it is, is an EngineProtocolError; none is filled in or changed.
"""

from __future__ import annotations

import math
from typing import Any, Final, NoReturn

import numpy as np

from turnstile.models import Float32Array
from turnstile_server.engines.protocol import ABOVE_ZERO
from turnstile_server.errors import EngineProtocolError

MESSAGE_CHARS: Final = 2000
"""Most characters of the engine's text that an error message repeats."""

INT32_MAX: Final = int(np.iinfo(np.int32).max)

FLOAT32_MAX: Final = float(np.finfo(np.float32).max)


def version_name(version: Any) -> str:
    if isinstance(version, bool) or not isinstance(version, str | int):
        refuse(f"a weight version is {str(version)[:MESSAGE_CHARS]!r}, not a name")
    return str(version)


def entry_id(entry: Any) -> int:
    if (
        not isinstance(entry, list)
        or len(entry) < 2
        or not isinstance(entry[1], int)
        or isinstance(entry[1], bool)
    ):
        refuse(f"a logprob entry is {entry!r}")
    if not 0 <= entry[1] <= INT32_MAX:
        refuse(f"a sampled id is {entry[1]}")
    token: int = entry[1]
    return token


def entry_logprob(entry: list[Any]) -> float:
    value = entry[0]
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        refuse(f"a logprob is {value!r}")
    if value > ABOVE_ZERO:
        refuse(f"a logprob is {value!r}, a probability above 1")
    return float(value)


def finite(values: list[float]) -> Float32Array:
    if not all(-FLOAT32_MAX <= value <= FLOAT32_MAX for value in values):  # NaN compares as False
        refuse("a logprob does not fit float32")
    return np.array(values, np.float32)


def refuse(what: str) -> NoReturn:
    raise EngineProtocolError(f"The engine's answer cannot be recorded: {what}.")
