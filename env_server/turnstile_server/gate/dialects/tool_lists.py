"""Lists of tools, read once for all calls that offer them.

An agent offers the same tools with every call, and so do all episodes of that agent. Holds: what is kept for a
text follows from that text alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

TOOL_LISTS = 32
"""Lists that are kept: those that were used last."""

TOOL_LIST_BYTES = 2 << 20
"""Bytes of their texts together; as values they take several times as much."""


@dataclass(slots=True, eq=False)
class ToolList:
    """A list's text, brackets included, and its value. ``made``: what a function made of a body with this list."""

    text: bytes
    value: list[Any]
    made: dict[Any, Any] = field(default_factory=dict)


class ToolLists:
    """The lists that were offered last. Not for several threads at once."""

    def __init__(self) -> None:
        self._lists: list[ToolList] = []

    def __iter__(self) -> Iterator[ToolList]:
        """The one that was used last is the first."""
        return reversed(self._lists)

    def use(self, one: ToolList) -> None:
        """Keeps the list, as the one that was used last."""
        if one in self._lists:
            self._lists.remove(one)
        self._lists.append(one)
        del self._lists[:-TOOL_LISTS]
        while self._lists and sum(len(each.text) for each in self._lists) > TOOL_LIST_BYTES:
            del self._lists[0]
