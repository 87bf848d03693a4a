"""Constants of this package: bounds that nobody has asked to change. Times are seconds, sizes bytes."""

from __future__ import annotations

from dataclasses import dataclass

from turnstile_server.settings import Bounds


@dataclass(frozen=True)
class TaskBounds(Bounds):
    """Bounds of task sources."""

    cached_rows: int = 64
    """Tasks of row sources kept in memory; others are read again when they are used."""
    max_rows: int = 1_000_000
    """Rows of one source (``rows:``), at most."""
    max_class_tasks: int = 10_000
    """Tasks of one Python class (a world), at most."""
