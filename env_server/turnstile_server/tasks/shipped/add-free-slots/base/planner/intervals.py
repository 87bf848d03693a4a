"""Intervals: pairs (start, end), start < end, the end not included."""

from __future__ import annotations

Interval = tuple[int, int]


def merge(intervals: list[Interval]) -> list[Interval]:
    """The same minutes as `intervals` (in any order, which may overlap), as few intervals as possible, sorted.

    Intervals that touch are one. The argument is not changed.
    """
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start < merged[-1][1]:
            merged[-1] = (merged[-1][0], end)
        else:
            merged.append((start, end))
    return merged
