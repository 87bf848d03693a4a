"""When there is time."""

from __future__ import annotations

from planner.intervals import Interval, merge


def free_slots(busy: list[Interval], day: Interval, length: int) -> list[Interval]:
    """The longest intervals within `day` that share no minute with any interval of `busy`, sorted.

    Only those of at least `length` minutes. What of `busy` lies outside the day does not matter. Raises
    ValueError for a length below 1.
    """
    if length < 1:
        raise ValueError("a slot has at least one minute")
    slots = []
    free_from = day[0]
    for start, end in merge(busy):
        if min(start, day[1]) - free_from >= length:
            slots.append((free_from, min(start, day[1])))
        free_from = max(free_from, end)
    if day[1] - free_from >= length:
        slots.append((free_from, day[1]))
    return slots
