"""A shelf as text."""

from __future__ import annotations

from shelf.inventory import Shelf


def report(shelf: Shelf) -> str:
    """One line per item, counts aligned to the right; empty for an empty shelf."""
    items = shelf.items()
    if not items:
        return ""
    width = max(len(name) for name in items)
    digits = max(len(str(count)) for count in items.values())
    return "\n".join(f"{name:<{width}}  {count:>{digits}}" for name, count in items.items())
