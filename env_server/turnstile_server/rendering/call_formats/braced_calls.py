"""Formats whose calls are ``call:NAME{key:value,…}`` between two marks, with a mark of its own around strings.

Strings are verbatim between two quoting marks; keys, numbers, ``true``, ``false`` and ``null`` (one template
writes ``None``) are bare, lists and objects in brackets and braces.
"""

from __future__ import annotations

import json
import re
from typing import Any

from turnstile.models import ParseNote, ParseStatus, ToolCall
from turnstile_server.rendering.call_formats.base import BaseFormat, read_attempts
from turnstile_server.rendering.call_formats.checked_calls import checked
from turnstile_server.rendering.call_formats.json_text import NUMBER, NotJson, skip, value_at
from turnstile_server.rendering.call_formats.protocol import CallFormat, Opening, Segment, Unread
from turnstile_server.rendering.call_formats.tool_schemas import ToolSchemas

_NAME = re.compile(r"\s*call:\s*([^\s{}]+)\s*\{")
_KEY = re.compile(r"\s*([^\s:,{}\[\]\"]+)\s*:")
_BARE = re.compile(r"\s*([^\s,{}\[\]\"<]+)")
_WORDS = {"true": True, "false": False, "null": None, "None": None, "True": True, "False": False}


class _NoCall(ValueError):
    """A text is no call of this form."""


class BracedCalls(BaseFormat):
    """A ``CallFormat``. ``quote``: the mark around strings. ``typed``: values say themselves what they are; else
    all of them are strings between two quotes, and the schema says."""

    def __init__(self, opening: str, closing: str, quote: str, *, typed: bool) -> None:
        self._opening, self._closing, self._quote, self._typed = opening, closing, quote, typed
        self.openings = (Opening(opening),)
        self.marks = (opening, closing, quote)

    def read(self, text: str, offered: ToolSchemas, *, ended: bool) -> list[Segment]:
        """See ``CallFormat``."""
        return read_attempts(
            text,
            lambda position: text.find(self._opening, position),
            lambda start: self._attempt(text, start, offered, ended=ended),
        )

    def _attempt(self, text: str, start: int, offered: ToolSchemas, *, ended: bool) -> tuple[list[Segment], int]:
        inside = start + len(self._opening)
        named = _NAME.match(text, inside)
        status = ParseStatus.MALFORMED
        if named is not None:
            notes: list[str] = []
            try:
                arguments, end = self._object(text, named.end(), notes)
                end = skip(text, end)
                if text.startswith(self._closing, end):
                    end += len(self._closing)
                elif (end == len(text) and ended) or text.startswith(self._opening, end):
                    notes.append(ParseNote.END_MISSING)
                else:
                    raise _NoCall
                call = checked(self._typed_call(named[1], arguments, offered, notes), offered, notes)
                if not isinstance(call, ParseStatus):
                    return [call], end
                status = call
            except (_NoCall, NotJson, IndexError, RecursionError):
                status = ParseStatus.MALFORMED
        closing = text.find(self._closing, inside)
        opening = text.find(self._opening, inside)
        if closing >= 0 and (opening < 0 or closing < opening):
            end = closing + len(self._closing)
        else:
            end = opening if opening >= 0 else len(text)
            status = ParseStatus.UNCLOSED if not ended or opening >= 0 else status
        return [Unread(text[start:end], status)], end

    def _typed_call(
        self, name: str, arguments: dict[str, Any], offered: ToolSchemas, notes: list[str]
    ) -> ToolCall:
        if not self._typed:
            for key, value in arguments.items():
                if isinstance(value, str):
                    arguments[key], taken = offered.valued(name, key, value, python=True)
                    notes += taken
        return ToolCall(name, json.dumps(arguments, ensure_ascii=False))

    def _object(self, text: str, position: int, notes: list[str]) -> tuple[dict[str, Any], int]:
        """The members behind an opening brace, and where the closing one ends. Raises _NoCall."""
        members: dict[str, Any] = {}
        position = skip(text, position)
        while not text.startswith("}", position):
            key, position = self._key(text, position)
            if key in members:
                raise _NoCall
            members[key], position = self._value(text, position, notes)
            position = self._separated(text, position, "}")
        return members, position + 1

    def _key(self, text: str, position: int) -> tuple[str, int]:
        if text.startswith(self._quote, position):
            end = text.find(self._quote, position + len(self._quote))
            colon = skip(text, end + len(self._quote))
            if end < 0 or not text.startswith(":", colon):
                raise _NoCall
            return text[position + len(self._quote) : end], colon + 1
        match = _KEY.match(text, position)
        if match is None:
            raise _NoCall
        return match[1], match.end()

    def _value(self, text: str, position: int, notes: list[str]) -> tuple[Any, int]:
        position = skip(text, position)
        if text.startswith(self._quote, position):
            return self._string(text, position + len(self._quote))
        if text.startswith("{", position):
            return self._object(text, position + 1, notes)
        if text.startswith("[", position):
            items: list[Any] = []
            position = skip(text, position + 1)
            while not text.startswith("]", position):
                item, position = self._value(text, position, notes)
                items.append(item)
                position = self._separated(text, position, "]")
            return items, position + 1
        if text.startswith('"', position):  # as JSON has it
            value = value_at(text, position)
            notes.append(ParseNote.OTHER_FORM)
            return value.value, value.end
        match = _BARE.match(text, position)
        if match is None:
            raise _NoCall
        if match[1] in _WORDS:
            return _WORDS[match[1]], match.end()
        if NUMBER.fullmatch(match[1]):
            return json.loads(match[1]), match.end()
        raise _NoCall

    def _string(self, text: str, start: int) -> tuple[str, int]:
        """A string up to the first quote behind which the call can go on: the mark may stand in the string."""
        end = text.find(self._quote, start)
        while end >= 0:
            behind = end + len(self._quote)
            if text[skip(text, behind) : skip(text, behind) + 1] in (",", "}", "]"):
                return text[start:end], behind
            end = text.find(self._quote, behind)
        raise _NoCall

    @staticmethod
    def _separated(text: str, position: int, closing: str) -> int:
        """The place behind a comma, or of the closing bracket. Raises _NoCall."""
        position = skip(text, position)
        if text.startswith(",", position):
            return skip(text, position + 1)
        if not text.startswith(closing, position):
            raise _NoCall
        return position


def gemma4() -> CallFormat:
    """Gemma 4: ``<|tool_call>call:NAME{key:<|"|>text<|"|>,…}<tool_call|>``."""
    return BracedCalls("<|tool_call>", "<tool_call|>", '<|"|>', typed=True)


def function_gemma() -> CallFormat:
    """FunctionGemma: ``<start_function_call>call:NAME{key:<escape>text<escape>,…}<end_function_call>``."""
    return BracedCalls("<start_function_call>", "<end_function_call>", "<escape>", typed=False)
