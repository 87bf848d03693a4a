"""How long to wait between attempts."""

from __future__ import annotations

from collections.abc import Iterator


def delays(attempts: int, first: float, factor: float, ceiling: float) -> Iterator[float]:
    """The waits between `attempts` attempts: one fewer than attempts. The first is `first`, each later one
    `factor` times the one before, and none is above `ceiling`."""
    delay = first
    for _ in range(attempts - 1):
        yield min(delay, ceiling)
        delay *= factor
