"""What call formats share: no ids of their own, text that is not marked up, and a reply as attempts with text
between."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from turnstile.models import ToolCall
from turnstile_server.rendering.call_formats.protocol import Segment, Shown, Unread

MOST_ATTEMPTS: Final = 1000
MOST_UNREAD: Final = 20
"""Attempts at a call that are read in one reply, and those among them that are none. What follows is text: no
model means so many, and each may look through the whole reply, which must not hold up others."""


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
    position = unread = 0
    for _ in range(MOST_ATTEMPTS):
        start = find(position)
        if start < 0 or unread == MOST_UNREAD:
            break
        segments.append(Shown(text[position:start]))
        found, position = attempt(start)
        unread += any(isinstance(segment, Unread) for segment in found)
        segments += found
    return [*segments, Shown(text[position:])]
