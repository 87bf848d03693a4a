"""Placement of new episodes: each goes to the least busy worker. Pure.

A worker's load is what it last told, and what was placed there since: between two looks a burst of creations must
not all go to one worker. What is being created may be in an answer already or not; it counts until it is made.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(slots=True)
class WorkerLoad:
    """``open``: episodes that had not ended when the worker was last asked; None: it does not answer.
    ``placing``: that are being created. ``placed``: created since it was asked."""

    open: int | None = None
    placing: int = 0
    placed: int = 0
    refusal: str | None = None
    held: bool = False

    @property
    def takes(self) -> bool:
        return self.open is not None and self.refusal is None

    @property
    def busy(self) -> int:
        return (self.open or 0) + self.placing + self.placed


class LeastBusy:
    """``workers``: the numbers of those that take episodes at all."""

    def __init__(self, workers: Collection[int]) -> None:
        self.loads = {number: WorkerLoad() for number in workers}
        self._last = -1

    def told(self, number: int, open_: int, refusal: str | None, *, held: bool, asked: int) -> None:
        """Take up a worker's report. ``asked``: the number of episodes placed there when it was asked; its answer
        counts only those."""
        load = self.loads[number]
        load.open, load.refusal, load.held = open_, refusal, held
        load.placed = max(0, load.placed - asked)

    def silent(self, number: int) -> None:
        """It does not answer, or is not there."""
        load = self.loads[number]
        load.open, load.refusal, load.held, load.placed = None, None, False, 0

    def choose(self) -> int:
        """The worker with the fewest open episodes; of equal ones the next in turn. Where none takes episodes, one
        that will say why."""
        order = sorted(self.loads, key=lambda number: (number <= self._last, number))
        able = [number for number in order if self.loads[number].takes] or order
        chosen = min(able, key=lambda number: self.loads[number].busy)  # the first of the smallest
        self._last = chosen
        return chosen

    @contextmanager
    def placing(self, number: int) -> Iterator[None]:
        """An episode is created there while the block runs."""
        load = self.loads.get(number, WorkerLoad())
        load.placing += 1
        try:
            yield
        finally:
            load.placing -= 1
            load.placed += 1  # where it failed, until the worker is asked again

    def placed(self, number: int) -> None:
        """Episodes may be created there that nobody tells of: those of a socket."""
        if number in self.loads:
            self.loads[number].placed += 1
