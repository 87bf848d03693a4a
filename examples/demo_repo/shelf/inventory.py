"""The shelf itself: items by name, each with a count."""

from __future__ import annotations


class OutOfStock(Exception):
    """More was asked for than the shelf holds."""


class Shelf:
    def __init__(self) -> None:
        self._counts: dict[str, int] = {}

    def put(self, item: str, count: int = 1) -> None:
        """Adds ``count`` of ``item``. Raises ValueError for a negative count."""
        if count < 0:
            raise ValueError("count must not be negative")
        self._counts[item] = self.count(item) + count

    def take(self, item: str, count: int = 1) -> None:
        """Removes ``count`` of ``item``. Raises OutOfStock, and takes nothing, when there are fewer."""
        if count < 0:
            raise ValueError("count must not be negative")
        self._counts[item] = self.count(item) - count

    def count(self, item: str) -> int:
        """How many of ``item`` there are; 0 for an unknown item."""
        return self._counts.get(item, 0)

    def items(self) -> dict[str, int]:
        """All items with a count, sorted by name."""
        return dict(sorted(self._counts.items()))
