"""Which rollouts the trainer's steps took: rows are taken in the order in which they were sent. Pure."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from dataclasses import replace as _replace

from turnstile.rollout import Rollout


@dataclass(slots=True)
class Taken:
    """The rollouts that one step took. ``left_out``: those that gave it no row."""

    used: list[Rollout] = field(default_factory=list)
    left_out: list[Rollout] = field(default_factory=list)


class SentRollouts:
    """The rollouts whose rows were sent and that no step has taken so far."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[int, int, Rollout]] = deque()
        """Number of the rows sent before it, number of its rows, and the rollout without its samples."""
        self._rows = 0

    def sent(self, rollout: Rollout, rows: int) -> None:
        self._waiting.append((self._rows, rows, _replace(rollout, samples=None)))
        self._rows += rows

    def take(self, rows: int) -> Taken:
        """``rows``: that the trainer has taken in all. A rollout is taken with its first row; one without rows as
        soon as all rows before it are."""
        found = Taken()
        while self._waiting:
            before, its, rollout = self._waiting[0]
            if before + min(its, 1) > rows:
                break
            self._waiting.popleft()
            (found.used if its else found.left_out).append(rollout)
        return found
