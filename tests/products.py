"""What `.ci/run` plays of many alike: examples of a property, cases of a product. `make everything` plays all."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
from hypothesis import settings

ALL = 100
"""Examples of each property in the profile `thorough`."""
LEAST = 5
ParameterSet = type(pytest.param())


def examples(number: int) -> int:
    """``number`` of examples in `make everything`, and so much less elsewhere as its profile has fewer."""
    return max(min(number, LEAST), number * settings.default.max_examples // ALL)


def cases(values: Iterable[Any], played: Callable[[Any], bool] | int) -> list[Any]:
    """Parameters of a test; a tuple is the values of several arguments. All are marked `thorough` but those for
    which ``played`` is true, or the first ``played``."""
    found: list[Any] = []
    for number, value in enumerate(values):
        plain = number < played if isinstance(played, int) else played(value)
        if plain:
            found.append(value)
        elif isinstance(value, ParameterSet):
            found.append(pytest.param(*value.values, marks=[*value.marks, pytest.mark.thorough], id=value.id))
        else:
            found.append(
                pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=pytest.mark.thorough)
            )
    return found
