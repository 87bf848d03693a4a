"""How many examples of a property a run plays."""

from __future__ import annotations

from hypothesis import settings

ALL = 100
"""Examples of each property in the profile `thorough`, which `make everything` plays."""
LEAST = 5


def examples(number: int) -> int:
    """``number`` of examples in `make everything`, and so much less elsewhere as its profile has fewer."""
    return max(min(number, LEAST), number * settings.default.max_examples // ALL)
