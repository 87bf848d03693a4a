"""A cache that forgets what was used least recently."""

from __future__ import annotations

from typing import Any, Hashable

_MISSING = object()


class LruCache:
    """At most `capacity` entries. Reading and writing an entry are both uses of it.

    `hits` and `misses` count the calls of `get` that did and did not find an entry, whatever its value.
    """

    def __init__(self, capacity: int) -> None:
        """Raises ValueError for a capacity below 1."""
        self.capacity = capacity
        self.hits = 0
        self.misses = 0
        self._entries: dict[Hashable, Any] = {}

    def get(self, key: Hashable, default: Any = None) -> Any:
        """The value of `key`, which is used by this; `default` where there is none."""
        value = self._entries.get(key)
        if value:
            self.hits += 1
            return value
        self.misses += 1
        return default

    def put(self, key: Hashable, value: Any) -> None:
        """Sets the value of `key`, which is used by this. When it is new and the cache is full, the entry
        that was used least recently goes."""
        if len(self._entries) >= self.capacity:
            oldest = next(iter(self._entries))
            del self._entries[oldest]
        self._entries[key] = value

    def __contains__(self, key: Hashable) -> bool:
        """Whether there is an entry. Asking is no use of it, and is not counted."""
        return key in self._entries

    def __len__(self) -> int:
        return len(self._entries)
