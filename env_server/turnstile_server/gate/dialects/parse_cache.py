"""Messages that were parsed before: an agent sends its whole history with every call, most of it as it was.

Holds: a message is taken from an earlier call only where every message up to it came as the same JSON, so what
is returned is what parsing would return. It only saves time, and remembers only the latest call of a few
conversations.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from turnstile.models import Message

CONVERSATIONS = 8
"""Histories remembered: one for each conversation (sub-agent) that takes turns now."""


@dataclass(frozen=True, slots=True)
class _History:
    """The first ``len(items)`` items of a call, as they came and as they were parsed: some messages each."""

    items: Sequence[dict[str, Any]]
    messages: Sequence[tuple[Message, ...]]

    def common(self, items: Sequence[dict[str, Any]]) -> int:
        """How many messages ``items`` begins with that this history begins with."""
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
    """Of one episode and one dialect."""

    def __init__(self) -> None:
        self._histories: list[_History] = []

    def parse(
        self,
        items: Sequence[dict[str, Any]],
        parse: Callable[[dict[str, Any], int], tuple[Message, ...]],
        exact: Callable[[dict[str, Any]], bool],
    ) -> tuple[Message, ...]:
        """``parse(item, index)`` of every item joined, but for those known from before; each must depend on its
        own item alone.

        ``exact``: whether Python's equality of such items is equality of their JSON. It takes 1 for 1.0 and for
        true, which matters where an item carries a call's arguments as an object.
        """
        lengths = [history.common(items) for history in self._histories]
        count = max(lengths, default=0)
        known: Sequence[tuple[Message, ...]] = ()
        if count:
            found = self._histories[lengths.index(count)]
            known = found.messages[:count]
            if 2 * count >= len(found.items):
                self._histories.remove(found)  # this call goes on where that one was
        new = [parse(item, index) for index, item in enumerate(items[count:], count)]
        messages = (*known, *new)
        kept = next((at for at in range(count, len(items)) if not exact(items[at])), len(items))
        self._histories = [*self._histories[-CONVERSATIONS + 1 :], _History(items[:kept], messages[:kept])]
        return tuple(message for some in messages for message in some)
