"""Limits on how long an engine may be silent, and the pauses that do not count.

What must hold: time in which we hold the engine paused counts against no time-out.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import anyio


class Timed(Protocol):
    """Something that ends at a moment that can be moved: a cancel scope, a wait for an engine. ``deadline``:
    seconds of anyio's clock."""

    @property
    def deadline(self) -> float: ...

    @deadline.setter
    def deadline(self, value: float) -> None: ...


class HoldClock:
    """Stops the deadlines of calls while we hold the engine paused; on release each has its whole limit again."""

    def __init__(self) -> None:
        self.held = False
        self.released_at = -math.inf
        self._limits: dict[Timed, float] = {}

    def hold(self) -> None:
        self.held = True
        for timed in self._limits:
            timed.deadline = math.inf

    def release(self) -> None:
        self.held = False
        self.released_at = anyio.current_time()
        for timed, limit_s in self._limits.items():
            timed.deadline = self.released_at + limit_s

    def due(self, since: float, limit_s: float) -> float:
        """When ``limit_s`` seconds from ``since`` are over, as things stand now."""
        return math.inf if self.held else max(since, self.released_at) + limit_s

    def follow(self, timed: Timed, limit_s: float) -> None:
        """Moves the deadline of ``timed`` with the pauses, until ``leave``. Again: with another limit."""
        self._limits[timed] = limit_s

    def leave(self, timed: Timed) -> None:
        """No-op for what is not followed."""
        self._limits.pop(timed, None)


@dataclass(frozen=True, slots=True)
class Deadline:
    """``limit_s`` seconds from ``since`` (anyio's clock), not counting pauses of ``hold``."""

    since: float
    limit_s: float
    hold: HoldClock | None = None

    @contextmanager
    def scope(self) -> Iterator[anyio.CancelScope]:
        """A cancel scope that ends at the deadline; ``cancelled_caught`` then says so."""
        if self.hold is None:
            with anyio.CancelScope(deadline=self.since + self.limit_s) as scope:
                yield scope
            return
        with anyio.CancelScope(deadline=self.hold.due(self.since, self.limit_s)) as scope:
            self.hold.follow(scope, self.limit_s)
            try:
                yield scope
            finally:
                self.hold.leave(scope)
