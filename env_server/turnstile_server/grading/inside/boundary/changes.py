"""Which mutable containers a call has changed, their contents before and after, by identity; and copies of them.

Python 3.9 or later, standard library only.
"""

from __future__ import annotations

import collections
import copy
from typing import Any

_MAPPINGS = (dict, collections.OrderedDict, collections.Counter, collections.defaultdict)
_ROWS = (list, collections.deque)


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


def copies(containers: list[Any]) -> list[Any]:
    """The same containers once more, which hold one another as those do, and everything else by reference."""
    made: dict[int, Any] = {}

    def copied(value: Any) -> Any:
        kind = type(value)
        if id(value) in made:
            return made[id(value)]
        if kind in (tuple, frozenset):
            return kind([copied(each) for each in value])
        if kind not in (*_MAPPINGS, *_ROWS, set, bytearray):
            return value
        new = made[id(value)] = copy.copy(value)
        if kind in _MAPPINGS:
            new.clear()
            for key, each in value.items():
                dict.__setitem__(new, copied(key), copied(each))
        elif kind in _ROWS:
            new.clear()
            new.extend([copied(each) for each in value])
        return new

    return [copied(each) for each in containers]
