"""Reads what a world's ``grade`` returned. Pure."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from numbers import Real

COMPONENT = "world"
"""The component's name where ``grade`` gives one number."""
MAX_COMPONENTS = 100
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,63}")


def components_of(given: object) -> dict[str, float]:
    """The components by name. Raises ValueError, with a sentence about what ``grade`` gave."""
    if not isinstance(given, Mapping):
        return {COMPONENT: _number(given, "grade returned")}
    if not given:
        raise ValueError("grade returned no component; give a number, or at least one component")
    if len(given) > MAX_COMPONENTS:
        raise ValueError(f"grade returned {len(given)} components; the most is {MAX_COMPONENTS}")
    for name in given:
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise ValueError(
                f"grade returned a component named {name!r:.100}; a name has letters, digits, `_`, `-` and `.`"
            )
    return {name: _number(value, f"grade returned for {name!r}") for name, value in given.items()}


def _number(value: object, what: str) -> float:
    """``value`` as a float from 0 to 1. True and False are 1 and 0: ``return self.order == self.wanted``."""
    if value is None:
        raise ValueError(f"{what} None; a world that grades returns a number from 0 to 1")
    if not isinstance(value, Real):
        raise ValueError(f"{what} a {type(value).__name__}, not a number from 0 to 1")
    number = float(value)
    if not math.isfinite(number) or not 0.0 <= number <= 1.0:
        raise ValueError(f"{what} {number:g}, which is not a number from 0 to 1")
    return number
