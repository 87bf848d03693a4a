"""The histories of an episode, as the bytes in which they came and as the messages that those are.

What must hold: a history's text is whole items of a list, each of which has been read; its weight is that of its
text. Text is kept in pieces, each at least twice as long as the next, so that a call copies little more than what
is new in it.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from turnstile.models import Message
from turnstile_server.gate.dialects.tool_lists import ToolList
from turnstile_server.http.json_values import Weight, weigh

LAST_ITEMS = 3
"""Items at a body's end that may change when they come again."""


@dataclass(slots=True)
class Outline:
    """All of a body but its history. Two bodies of one outline differ in their histories alone.

    ``made``: what its dialect made of it, given ``params``; None: nothing yet. ``tools``: its list of tools, whose
    text is a part of ``head`` or ``tail``; None where it has none, or none was found.
    """

    head: bytes
    tail: bytes
    weight: Weight
    tools: ToolList | None = None
    made: Any = None
    params: Mapping[str, str] = field(default_factory=dict)

    @property
    def size(self) -> int:
        """Bytes that it keeps."""
        return len(self.head) + len(self.tail)


@dataclass(frozen=True, slots=True)
class NewItems:
    """Items of ``body`` from ``start`` on. ``ends``: offsets in ``body``. ``weight``: theirs, where it is known;
    its size does not matter."""

    body: bytes
    start: int
    ends: Sequence[int]
    messages: Sequence[tuple[Message, ...]]
    weight: Weight | None = None


class Conversation:
    """One history.

    It keeps where its items end as numbers in an array. A history that is *cold* has forgotten all but its
    messages.
    """

    def __init__(self, outline: Outline | None) -> None:
        self.outline = outline
        self.messages: list[Message] = []
        self._pieces: list[bytes] = []
        self._ends = array("q")
        self._counts = array("q")
        """For each item: the messages up to its end."""
        self._weight = Weight()

    @property
    def size(self) -> int:
        """Bytes of text that it keeps, its outline included."""
        return (self._ends[-1] if self._ends else 0) + (0 if self.outline is None else self.outline.size)

    def __len__(self) -> int:
        """Items whose text is known."""
        return len(self._ends)

    def end(self, count: int) -> int:
        """Bytes of the first ``count`` items."""
        return self._ends[count - 1] if count else 0

    def message_count(self, count: int) -> int:
        """Messages of the first ``count`` items."""
        return self._counts[count - 1] if count else 0

    def weight(self, count: int) -> Weight:
        """The weight of the first ``count`` items. The time that it takes grows with the other items."""
        weight, end = self._weight, self.end(len(self))
        kept = self.end(count)
        for piece in reversed(self._pieces):
            if end <= kept:
                break
            end -= len(piece)
            weight = weight - weigh(piece, max(kept - end, 0))
        return weight

    def common(self, body: bytes, start: int) -> int:
        """The number of items at ``start`` of ``body`` that are the first of this history, byte for byte."""
        length = 0
        for piece in self._pieces:
            if not body.startswith(piece, start + length):
                length += _common(piece, body, start + length)
                break
            length += len(piece)
        return bisect_right(self._ends, length)

    def first(self, count: int) -> Conversation:
        """A history of its own of the first ``count`` items."""
        copied = Conversation(self.outline)
        copied.messages = self.messages[: self.message_count(count)]
        copied._pieces = list(self._pieces)
        copied._ends = self._ends[:count]
        copied._counts = self._counts[:count]
        copied._weight = self.weight(count)
        copied._cut_text()
        return copied

    def keep_first(self, count: int) -> None:
        """Forgets all but the first ``count`` items."""
        if count == len(self._ends):
            return
        self._weight = self.weight(count)
        del self.messages[self.message_count(count) :]
        del self._ends[count:]
        del self._counts[count:]
        self._cut_text()

    def extend(self, new: NewItems) -> None:
        """Adds items behind all that are known."""
        if not new.ends:
            return
        offset = self.end(len(self)) - new.start
        for end, messages in zip(new.ends, new.messages, strict=True):
            self.messages += messages
            self._ends.append(end + offset)
            self._counts.append(len(self.messages))
        text = new.body[new.start : new.ends[-1]]
        known = weigh(text) if new.weight is None else replace(new.weight, size=len(text))
        self._weight = self._weight + known
        # The last items in a piece of their own: a client that marks where it caches changes these, and no others.
        cut = new.ends[-LAST_ITEMS - 1] - new.start if len(new.ends) > LAST_ITEMS else 0
        self._append(text[:cut])
        self._append(text[cut:])

    def interned(self, new: Sequence[tuple[Message, ...]], count: int) -> list[tuple[Message, ...]]:
        """``new``, which follows the first ``count`` items, with the equal messages of this history in their
        places: so that equal messages are one object, however their bytes differ."""
        known = iter(self.messages[self.message_count(count) :])
        return [tuple(_one(message, next(known, None)) for message in some) for some in new]

    def cool(self) -> None:
        """Forgets all but its messages."""
        self.outline = None
        self._pieces.clear()
        self._weight = Weight()
        del self._ends[:]
        del self._counts[:]

    def _append(self, piece: bytes) -> None:
        pieces = self._pieces
        if piece:
            pieces.append(piece)
        while len(pieces) > 1 and len(pieces[-2]) < 2 * len(pieces[-1]):
            last = pieces.pop()
            pieces[-1] += last

    def _cut_text(self) -> None:
        left = self.end(len(self))
        for index, piece in enumerate(self._pieces):
            if left <= len(piece):
                self._pieces[index:] = [piece[:left]] if left else []
                return
            left -= len(piece)


def _common(piece: bytes, body: bytes, at: int) -> int:
    """The number of bytes at the start of ``piece`` that are those at ``at`` of ``body``: a search by halves, each
    of which is compared at the speed of memory."""
    known, most = 0, len(piece)
    while known < most:
        half = (known + most + 1) // 2
        if body.startswith(piece[known:half], at + known):
            known = half
        else:
            most = half - 1
    return known


def _one(message: Message, known: Message | None) -> Message:
    return known if known is not None and known == message else message
