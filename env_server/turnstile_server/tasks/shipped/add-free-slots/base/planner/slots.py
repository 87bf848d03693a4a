"""When there is time."""

from __future__ import annotations

from planner.intervals import Interval, merge


def free_slots(busy: list[Interval], day: Interval, length: int) -> list[Interval]:
    """The longest intervals within `day` that share no minute with any interval of `busy`, sorted.

    Only those of at least `length` minutes. What of `busy` lies outside the day does not matter. Raises
    ValueError for a length below 1.
    """
    raise NotImplementedError
