"""Which mutable containers a call has changed: their contents before and after, by identity.

Python 3.9 or later, standard library only.
"""

from __future__ import annotations

from typing import Any


def snapshot(container: Any) -> Any:
    return (
        dict(container)
        if isinstance(container, dict)
        else type(container)(container)
        if isinstance(container, (set, bytearray))
        else list(container)
    )


def same(one: Any, other: Any) -> bool:
    """True if nothing in a container was replaced. By identity: to compare would run code of what is in it."""
    if isinstance(one, dict):
        mine, theirs = list(one.items()), list(other.items())
        return len(mine) == len(theirs) and all(a is c and b is d for (a, b), (c, d) in zip(mine, theirs))  # noqa: B905
    if isinstance(one, set):
        return len(one) == len(other) and {id(each) for each in one} == {id(each) for each in other}
    if isinstance(one, bytearray):
        return bool(one == other)
    return len(one) == len(other) and all(a is b for a, b in zip(one, other))  # noqa: B905
