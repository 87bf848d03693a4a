"""Caches."""

from cachebox.lru import LruCache
from cachebox.memo import memoize

__all__ = ["LruCache", "memoize"]
