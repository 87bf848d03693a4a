"""Formats whose calls are a heading with the name, and JSON arguments behind it.

The JSON decides where a call ends, never a mark: a mark inside a string is text.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from turnstile.models import ParseNote, ParseStatus
from turnstile_server.rendering.call_formats.base import BaseFormat, read_attempts
from turnstile_server.rendering.call_formats.checked_calls import called
from turnstile_server.rendering.call_formats.json_text import NotJson, skip, value_at
from turnstile_server.rendering.call_formats.protocol import Called, Opening, Segment, Unread
from turnstile_server.rendering.call_formats.tool_schemas import ToolSchemas


@dataclass(frozen=True, slots=True)
class HeadedGrammar:
    """The form of such calls.

    ``block``, ``block_end``: the marks around all calls, empty where there are none. ``heading``: the heading of a
    call, with the group ``name`` and perhaps ``id``. ``end``: the regular expression of what stands behind the
    arguments, white space aside. ``marks``: literals that may be added tokens, beside the block's.
    """

    block: str
    block_end: str
    heading: str
    end: str = ""
    marks: tuple[str, ...] = ()

    @property
    def opening(self) -> str:
        """The literal that begins the first call."""
        return self.block or self.marks[0]


class HeadedCalls(BaseFormat):
    """A ``CallFormat`` of a ``HeadedGrammar``."""

    def __init__(self, grammar: HeadedGrammar) -> None:
        self._grammar = grammar
        self._heading = re.compile(grammar.heading)
        self._end = re.compile(grammar.end)
        self.openings = (Opening(grammar.opening),)
        self.marks = tuple(mark for mark in (grammar.block, grammar.block_end, *grammar.marks) if mark)

    def read(self, text: str, offered: ToolSchemas, *, ended: bool) -> list[Segment]:
        """See ``CallFormat``."""
        return read_attempts(
            text,
            lambda position: text.find(self._grammar.opening, position),
            lambda start: self._block(text, start, offered, ended),
        )

    def _block(self, text: str, start: int, offered: ToolSchemas, ended: bool) -> tuple[list[Segment], int]:
        """The calls that begin at ``start``, and where they end; all of it as text where one cannot be read."""
        grammar = self._grammar
        position = start + len(grammar.block)
        calls: list[Called] = []
        while heading := self._heading.match(text, skip(text, position)):
            try:
                arguments = value_at(text, heading.end())
            except NotJson as error:
                whole = error.status if ended else ParseStatus.UNCLOSED
                return self._unread(text, start, heading.end(), whole)
            place = skip(text, arguments.end)
            behind = self._end.match(text, place)
            notes: list[str] = []
            if behind is not None:
                position = behind.end() if grammar.end else arguments.end
            elif self._over(text, place, ended):
                position = place
                notes.append(ParseNote.END_MISSING)
            else:
                status = ParseStatus.UNCLOSED if place == len(text) else ParseStatus.MALFORMED
                return self._unread(text, start, arguments.end, status)
            own_id = heading.groupdict().get("id")
            call = called(heading["name"], arguments, offered, notes, own_id=own_id)
            if isinstance(call, ParseStatus):
                return self._unread(text, start, position, call)
            calls.append(call)
        place = skip(text, position)
        if not calls:
            return self._unread(text, start, place, ParseStatus.MALFORMED)
        if not grammar.block_end:
            return list(calls), position
        if text.startswith(grammar.block_end, place):
            return list(calls), place + len(grammar.block_end)
        if self._over(text, place, ended):
            return [Called(each.call, (*each.notes, ParseNote.END_MISSING)) for each in calls], place
        status = ParseStatus.UNCLOSED if place == len(text) else ParseStatus.MALFORMED
        return self._unread(text, start, place, status)

    def _over(self, text: str, place: int, ended: bool) -> bool:
        """True where a mark may be missing: the model ended the reply, or the block ends or begins anew."""
        grammar = self._grammar
        if place == len(text):
            return ended
        return any(text.startswith(mark, place) for mark in (grammar.block, grammar.block_end) if mark)

    def _unread(self, text: str, start: int, position: int, status: ParseStatus) -> tuple[list[Segment], int]:
        """The attempt as text: up to the mark that ends its block, the next block, or the end."""
        grammar = self._grammar
        closing = text.find(grammar.block_end, position) if grammar.block_end else -1
        opening = text.find(grammar.opening, max(position, start + 1))
        if closing >= 0 and (opening < 0 or closing < opening):
            end = closing + len(grammar.block_end)
        else:
            end = opening if opening >= 0 else len(text)
        return [Unread(text[start:end], status)], end
