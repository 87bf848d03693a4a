"""Where a new episode goes: to the least busy worker. Pure.

A worker's load is what it last told, and what was placed there since: between two looks a burst of creations must
not all go to one worker.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass


@dataclass(slots=True)
class WorkerLoad:
    """``open``: episodes that had not ended when the worker was last asked; None: it does not answer.
    ``placed``: since then."""

    open: int | None = None
    placed: int = 0
    refusal: str | None = None
    held: bool = False

    @property
    def takes(self) -> bool:
        return self.open is not None and self.refusal is None

    @property
    def busy(self) -> int:
        return (self.open or 0) + self.placed


class LeastBusy:
    """``workers``: the numbers of those that take episodes at all."""

    def __init__(self, workers: Collection[int]) -> None:
        self.loads = {number: WorkerLoad() for number in workers}
        self._last = -1

    def told(self, number: int, open_: int, refusal: str | None, *, held: bool, asked: int) -> None:
        """What the worker says. ``asked``: what was placed there when it was asked; only that is in its answer."""
        load = self.loads[number]
        load.open, load.refusal, load.held = open_, refusal, held
        load.placed = max(0, load.placed - asked)

    def silent(self, number: int) -> None:
        """It does not answer, or is not there."""
        self.loads[number] = WorkerLoad()

    def choose(self) -> int:
        """The worker with the fewest open episodes; of equal ones the next in turn. Where none takes episodes, one
        that will say why."""
        order = sorted(self.loads, key=lambda number: (number <= self._last, number))
        able = [number for number in order if self.loads[number].takes] or order
        chosen = min(able, key=lambda number: self.loads[number].busy)  # the first of the smallest
        self._last = chosen
        return chosen

    def placed(self, number: int) -> None:
        if number in self.loads:
            self.loads[number].placed += 1
