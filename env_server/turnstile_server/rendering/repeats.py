"""Finds long repeats of a few characters in a text, such as runs of spaces, without looking at each character."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

PERIOD_CHARS = 12
"""A repeat has the same character as so many before: it is of 1, 2, 3, 4, 6 or 12 characters."""

_COMPARED_CHARS = 1 << 12


@dataclass(frozen=True, slots=True)
class Repeat:
    """``text[start:end]``, in which each character is the one ``PERIOD_CHARS`` before it."""

    start: int
    end: int


def repeats(text: str, least: int) -> Iterator[Repeat]:
    """Those of ``least`` characters or more, in order. Looks at two places in so many characters."""
    at, done = least // 2, 0
    while at < len(text):
        if text[at : at + PERIOD_CHARS] == text[at + PERIOD_CHARS : at + 2 * PERIOD_CHARS]:
            repeat = Repeat(_first(text, at, done), _end(text, at))
            if repeat.end - repeat.start >= least:
                yield repeat
                done = repeat.end
                at = max(at, repeat.end)
        at += least // 2


def _end(text: str, at: int) -> int:
    size = _COMPARED_CHARS
    while size:
        following = text[at + PERIOD_CHARS : at + PERIOD_CHARS + size]
        if len(following) == size and text[at : at + size] == following:
            at += size
        else:
            size //= 2
    return at + PERIOD_CHARS


def _first(text: str, at: int, done: int) -> int:
    size = _COMPARED_CHARS
    while size:
        if at - size >= done and text[at - size : at] == text[at - size + PERIOD_CHARS : at + PERIOD_CHARS]:
            at -= size
        else:
            size //= 2
    return at
