"""Functions that remember their results."""

from __future__ import annotations

import functools
from typing import Any, Callable

from cachebox.lru import LruCache


def memoize(capacity: int) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A decorator for functions of positional arguments; the cache is the attribute `cache`."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        cache = LruCache(capacity)
        nothing = object()

        @functools.wraps(function)
        def call(*args: Any) -> Any:
            found = cache.get(args, nothing)
            if found is nothing:
                found = function(*args)
                cache.put(args, found)
            return found

        call.cache = cache  # type: ignore[attr-defined]
        return call

    return decorate
