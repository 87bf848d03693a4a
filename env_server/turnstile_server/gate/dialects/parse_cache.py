"""Saves parsing a known history again: an agent sends its whole history with every call, mostly unchanged.

Holds: a message is taken from an earlier call only where every item up to it came as the same JSON, so the result
is what parsing would give. Only the latest call of a few conversations is remembered.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from turnstile.models import Message

CONVERSATIONS = 8
"""How many histories are remembered: one for each conversation (sub-agent) that is active."""


@dataclass(frozen=True, slots=True)
class _History:
    """The first items of an earlier call, as they came and as they were parsed.

    One item may give several messages.
    """

    items: Sequence[dict[str, Any]]
    messages: Sequence[tuple[Message, ...]]

    def common(self, items: Sequence[dict[str, Any]]) -> int:
        """How many items at the start of ``items`` are those of this history."""
        count = 0
        try:
            for ours, theirs in zip(self.items, items, strict=False):
                if ours != theirs:
                    break
                count += 1
        except RecursionError:  # nested deeper than the interpreter compares: not known
            pass
        return count


class ParseCache:
    """The histories of one episode in one dialect."""

    def __init__(self) -> None:
        self._histories: list[_History] = []

    def parse(
        self,
        items: Sequence[dict[str, Any]],
        parse: Callable[[dict[str, Any], int], tuple[Message, ...]],
        exact: Callable[[dict[str, Any]], bool],
    ) -> tuple[Message, ...]:
        """The messages of all items: ``parse(item, index)`` of each, but for those known from before.

        ``parse`` may look at that item alone.

        ``exact``: whether Python's equality of such items is equality of their JSON. Python takes 1 for 1.0 and
        for true, which matters where an item carries a call's arguments as an object.
        """
        lengths = [history.common(items) for history in self._histories]
        count = max(lengths, default=0)
        known: Sequence[tuple[Message, ...]] = ()
        if count:
            found = self._histories[lengths.index(count)]
            known = found.messages[:count]
            if 2 * count >= len(found.items):
                self._histories.remove(found)  # this call continues that conversation
        new = [parse(item, index) for index, item in enumerate(items[count:], count)]
        messages = (*known, *new)
        kept = next((at for at in range(count, len(items)) if not exact(items[at])), len(items))
        self._histories = [*self._histories[-CONVERSATIONS + 1 :], _History(items[:kept], messages[:kept])]
        return tuple(message for some in messages for message in some)
