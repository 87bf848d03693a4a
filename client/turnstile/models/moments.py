"""Mean and standard deviation of rewards, for whatever finite numbers rewards are."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import NamedTuple

_SAFE = 1e100
"""Numbers up to this have squares, and sums of squares, that a float can be."""


class Moments(NamedTuple):
    mean: float
    deviation: float


def scale_of(values: Collection[float]) -> float:
    """The divisor with which no square and no sum of the values is too large: 1 for all usual ones."""
    largest = max(map(abs, values), default=0.0)
    return largest if largest > _SAFE else 1.0


def moments_of(values: Collection[float], *, less: int = 0) -> Moments:
    """Mean and standard deviation of at least ``less + 1`` values; the squares are divided by their number minus
    ``less``: 0 for a population, 1 for a sample. Equal values have exactly their mean, and no deviation."""
    first = next(iter(values))
    if all(value == first for value in values):
        return Moments(first, 0.0)
    scale = scale_of(values)
    scaled = [value / scale for value in values]
    mean = math.fsum(scaled) / len(scaled)
    variance = math.fsum((value - mean) ** 2 for value in scaled) / (len(scaled) - less)
    return Moments(mean * scale, math.sqrt(variance) * scale)
