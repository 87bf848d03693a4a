"""What call formats share: no ids of their own, text that is not marked up, and a reply as attempts with text
between."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from turnstile.models import ToolCall
from turnstile_server.rendering.call_formats.protocol import Segment, Shown

MOST_ATTEMPTS: Final = 1000
"""Attempts at a call that are read in one reply. What follows them is text: no model means so many, and a reply
that repeats an opening without end must not hold up others."""


class BaseFormat:
    """The members of ``CallFormat`` that most formats have alike."""

    frames_text = False

    def own_id(self, call: ToolCall, index: int) -> str | None:
        """See ``CallFormat``: no id stands in this model's context."""
        return None


def read_attempts(
    text: str, find: Callable[[int], int], attempt: Callable[[int], tuple[list[Segment], int]]
) -> list[Segment]:
    """The segments of ``text``. ``find``: the place of the next attempt from a position on, -1 for none.
    ``attempt``: the segments of the attempt that begins there, and where it ends."""
    segments: list[Segment] = []
    position = 0
    for _ in range(MOST_ATTEMPTS):
        start = find(position)
        if start < 0:
            break
        segments.append(Shown(text[position:start]))
        found, position = attempt(start)
        segments += found
    return [*segments, Shown(text[position:])]
