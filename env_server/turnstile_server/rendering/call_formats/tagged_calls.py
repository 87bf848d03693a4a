"""Formats whose calls are tags: a function, and a tag for each parameter with its value as bare text between.

Where a value ends is not written: it may hold the tag that closes it. The rule: a closing tag ends the value if
something follows it that may follow there (the next parameter, the end of the call), and if the value so far has
not opened more parameters than it closed. A value in which a parameter is open when it ends has lost its own
closing tag; the formats say if that is read. What cannot be read whole is text, never a call with less in it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

from turnstile.models import ParseNote, ParseStatus, ToolCall
from turnstile_server.rendering.call_formats.base import BaseFormat, read_attempts
from turnstile_server.rendering.call_formats.checked_calls import checked
from turnstile_server.rendering.call_formats.json_text import NotJson, skip, whole_value
from turnstile_server.rendering.call_formats.protocol import Opening, Segment, Unread
from turnstile_server.rendering.call_formats.tool_schemas import ToolSchemas

Valued = Callable[[ToolSchemas, str, str, "re.Match[str]", str], tuple[Any, tuple[str, ...]]]
"""A value: of the tools, the function's name, the parameter's, the match of its tag, and the text in it."""


def by_schema(
    offered: ToolSchemas, name: str, key: str, tag: re.Match[str], text: str
) -> tuple[Any, tuple[str, ...]]:
    """The value that the parameter's schema takes."""
    return offered.valued(name, key, text)


def by_schema_in_python(
    offered: ToolSchemas, name: str, key: str, tag: re.Match[str], text: str
) -> tuple[Any, tuple[str, ...]]:
    """The same where templates write Python's ``True``, ``None`` and lists."""
    return offered.valued(name, key, text, python=True)


def by_tag(
    offered: ToolSchemas, name: str, key: str, tag: re.Match[str], text: str
) -> tuple[Any, tuple[str, ...]]:
    """A string where the tag says so (its group ``string``), else JSON; what is no JSON is a string."""
    notes = () if offered.declares(name, key) or name not in offered else (ParseNote.UNDECLARED_PARAMETER,)
    if tag["string"] is not None:
        return text, notes
    try:
        return whole_value(text).value, notes
    except NotJson:
        return text, (*notes, ParseNote.VALUE_UNTYPED)


@dataclass(frozen=True, slots=True)
class TaggedGrammar:
    """The form of such calls.

    ``block``, ``block_end``: the tags around all calls, empty where there are none. ``function``: the tag of a
    call, with the group ``name``; ``function_end``: its closing tag, empty where the block's is. ``parameter``:
    the tag of a parameter, with the group ``key``; ``parameter_end``. ``line_breaks``: one line break on each side
    of a value is markup. ``missing_end_read``: a parameter that is not closed ends where the next one begins.
    ``function_alone``: a function without the block's opening tag is read where it begins a line and the tool is
    offered. ``valued``: the value of a text. ``marks``: literals in the tags that may be added tokens, beside the
    block's.
    """

    block: str
    block_end: str
    function: str
    function_end: str
    parameter: str
    parameter_end: str
    line_breaks: bool = False
    missing_end_read: bool = False
    function_alone: str = ""
    valued: Valued = by_schema
    marks: tuple[str, ...] = ()


_MOST_UNCLOSED: Final = 20
"""Parameters of one block that are not closed. The end of each is looked for in all of the reply."""


class _Malformed(Exception):
    """A call that cannot be read; ``status`` says why."""

    def __init__(self, status: ParseStatus) -> None:
        super().__init__(status)
        self.status = status


class TaggedCalls(BaseFormat):
    """A ``CallFormat`` of a ``TaggedGrammar``."""

    def __init__(self, grammar: TaggedGrammar) -> None:
        self._grammar = grammar
        self._function = re.compile(grammar.function)
        self._parameter = re.compile(grammar.parameter)
        self._first = grammar.block or grammar.function_alone
        alone = (Opening(grammar.function_alone),) if grammar.function_alone else ()
        self.openings = (Opening(grammar.block), *alone) if grammar.block else alone
        tags = (grammar.block, grammar.block_end, grammar.function_end, grammar.parameter_end)
        self.marks = tuple(mark for mark in (*tags, *grammar.marks) if mark)

    def read(self, text: str, offered: ToolSchemas, *, ended: bool) -> list[Segment]:
        """See ``CallFormat``."""

        def attempt(start: int) -> tuple[list[Segment], int]:
            try:
                return _Reading(self, text, offered, ended).block(start)
            except _Malformed as error:
                end = self._unread_end(text, start)
                return [Unread(text[start:end], error.status)], end

        return read_attempts(text, lambda position: self._next(text, position, offered), attempt)

    def _next(self, text: str, position: int, offered: ToolSchemas) -> int:
        """The place of the next attempt, -1 for none."""
        grammar = self._grammar
        block = text.find(grammar.block, position) if grammar.block else -1
        if grammar.function_alone:
            for match in self._function.finditer(text, position, block if block >= 0 else len(text)):
                if _begins_line(text, match.start()) and match["name"] in offered:
                    return match.start()
        return block

    def _unread_end(self, text: str, start: int) -> int:
        """Where an attempt that is text ends: behind its closing tag, before the next one, or with the text."""
        grammar = self._grammar
        closing = grammar.block_end or grammar.function_end
        end = text.find(closing, start + 1)
        opening = text.find(self._first, start + 1) if self._first else -1
        if end >= 0 and (opening < 0 or end < opening):
            return end + len(closing)
        return opening if opening >= 0 else len(text)

    @property
    def grammar(self) -> TaggedGrammar:
        return self._grammar

    @property
    def function(self) -> re.Pattern[str]:
        return self._function

    @property
    def parameter(self) -> re.Pattern[str]:
        return self._parameter


class _Reading:
    """One text that is read."""

    def __init__(self, calls: TaggedCalls, text: str, offered: ToolSchemas, ended: bool) -> None:
        self._grammar = calls.grammar
        self._function = calls.function
        self._parameter = calls.parameter
        self._text = text
        self._offered = offered
        self._ended = ended
        self._unclosed = 0

    def block(self, start: int) -> tuple[list[Segment], int]:
        """The calls of the block at ``start``, and where it ends. Raises _Malformed."""
        grammar, text = self._grammar, self._text
        opened = bool(grammar.block) and text.startswith(grammar.block, start)
        notes: list[str] = [] if opened or not grammar.block else [ParseNote.OPENING_MISSING]
        position = skip(text, start + len(grammar.block) if opened else start)
        read: list[tuple[ToolCall, list[str]]] = []
        while match := self._function.match(text, position):
            call, found, position = self._call(match)
            read.append((call, found))
            behind = position
            position = skip(text, position)
        if not read:
            raise _Malformed(ParseStatus.UNCLOSED if position == len(text) else ParseStatus.MALFORMED)
        if grammar.block_end and text.startswith(grammar.block_end, position):
            position += len(grammar.block_end)
        elif grammar.block and opened:
            if not self._over(position):
                raise _Malformed(ParseStatus.UNCLOSED if position == len(text) else ParseStatus.MALFORMED)
            notes.append(ParseNote.END_MISSING)
        else:
            position = behind
        calls: list[Segment] = []
        for call, found in read:
            checked_call = checked(call, self._offered, [*notes, *found])
            if isinstance(checked_call, ParseStatus):
                raise _Malformed(checked_call)
            calls.append(checked_call)
        return calls, position

    def _over(self, position: int) -> bool:
        """True where a call may end without its closing tag: the model ended the reply, or the next block
        begins."""
        at_end = position == len(self._text) and self._ended
        return at_end or bool(self._grammar.block and self._text.startswith(self._grammar.block, position))

    def _call(self, match: re.Match[str]) -> tuple[ToolCall, list[str], int]:
        grammar, text, name = self._grammar, self._text, match["name"].strip()
        arguments: dict[str, Any] = {}
        notes: list[str] = []
        position = match.end()
        while True:
            place = skip(text, position)
            tag = self._parameter.match(text, place)
            if tag is None:
                break
            value, position, found = self._value(tag)
            key = tag["key"].strip()
            if key in arguments:
                raise _Malformed(ParseStatus.MALFORMED)
            arguments[key], taken = grammar.valued(self._offered, name, key, tag, value)
            notes += (*found, *taken)
        if grammar.function_end and text.startswith(grammar.function_end, place):
            place += len(grammar.function_end)
        elif grammar.function_end:
            if not (self._over(place) or (grammar.block_end and text.startswith(grammar.block_end, place))):
                raise _Malformed(ParseStatus.UNCLOSED if place == len(text) else ParseStatus.MALFORMED)
            notes.append(ParseNote.END_MISSING)
        elif not (text.startswith(grammar.block_end, place) or (arguments and self._over(place))):
            raise _Malformed(ParseStatus.UNCLOSED if place == len(text) else ParseStatus.MALFORMED)
        return ToolCall(name, json.dumps(arguments, ensure_ascii=False)), notes, place

    def _value(self, tag: re.Match[str]) -> tuple[str, int, list[str]]:
        """The value behind a parameter's tag, where its closing tag ends, and the liberties. Raises _Malformed."""
        grammar, text, start = self._grammar, self._text, tag.end()
        first: int | None = None
        opened = closed = 0
        counted = start
        end = text.find(grammar.parameter_end, start)
        while end >= 0:
            opened += sum(1 for _ in self._parameter_places(counted, end))
            counted = end
            behind = end + len(grammar.parameter_end)
            if self._may_follow(behind):
                if opened <= closed:
                    return self._bare(text[start:end]), behind, [ParseNote.END_IN_VALUE] if closed else []
                first = end if first is None else first
            closed += 1
            end = text.find(grammar.parameter_end, behind)
        self._unclosed += 1
        if not grammar.missing_end_read or self._unclosed > _MOST_UNCLOSED:
            raise _Malformed(ParseStatus.MALFORMED if closed or self._ended else ParseStatus.UNCLOSED)
        if first is not None:
            opening = next(self._parameter_places(start, first), None)
            if opening is not None:
                return self._bare(text[start:opening]), opening, [ParseNote.PARAMETER_END_MISSING]
        end = self._function_end(start)
        return self._bare(text[start:end]), end, [ParseNote.PARAMETER_END_MISSING]

    def _function_end(self, start: int) -> int:
        """The closing tag of the function in which a value is not closed. Raises _Malformed."""
        grammar, text = self._grammar, self._text
        end = text.find(grammar.function_end, start)
        while end >= 0:
            behind = skip(text, end + len(grammar.function_end))
            if text.startswith(grammar.block_end, behind) or self._over(behind):
                if next(self._parameter_places(start, end), None) is None:
                    return end
                break
            end = text.find(grammar.function_end, end + 1)
        raise _Malformed(ParseStatus.UNCLOSED if not self._ended else ParseStatus.MALFORMED)

    def _bare(self, value: str) -> str:
        if not self._grammar.line_breaks:
            return value
        return value.removeprefix("\n").removesuffix("\n")

    def _parameter_places(self, start: int, end: int) -> Iterator[int]:
        """Where parameters are opened inside a value: at the beginning of a line where line breaks are markup."""
        for match in self._parameter.finditer(self._text, start, end):
            if not self._grammar.line_breaks or self._text[match.start() - 1] == "\n":
                yield match.start()

    def _may_follow(self, behind: int) -> bool:
        """True where what stands at ``behind`` may follow the closing tag of a parameter."""
        grammar, text = self._grammar, self._text
        place = skip(text, behind)
        if place == len(text) or self._parameter.match(text, place):
            return True
        if grammar.function_end and text.startswith(grammar.function_end, place):
            place = skip(text, place + len(grammar.function_end))
            if place == len(text) or not grammar.block or self._function.match(text, place):
                return True
        if grammar.block_end and text.startswith(grammar.block_end, place):
            closed = text.find(grammar.parameter_end, place)
            return closed < 0 or text.find(grammar.block, place + len(grammar.block_end), closed) >= 0
        return bool(grammar.block) and text.startswith(grammar.block, place)


def _begins_line(text: str, position: int) -> bool:
    while position > 0 and text[position - 1] in " \t":
        position -= 1
    return position == 0 or text[position - 1] == "\n"
