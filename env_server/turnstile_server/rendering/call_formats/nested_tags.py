"""MiniMax M3: values as nested tags, each behind a token of its own.

``P<tool_call>``, ``P<invoke name="N">``, and for each parameter ``P<KEY>value P</KEY>``, where P is the token
``]<]minimax[>[``. A list is ``P<item>…P</item>`` one after another, an object a tag for each member. Types are not
written: a bare text is what its schema takes, and in lists and objects without schemas what JSON makes of it, else
a string. The template leaves null out, and an empty list and an empty object look alike.
"""

from __future__ import annotations

import json
import re
from typing import Any

from turnstile.models import ParseNote, ParseStatus, ToolCall
from turnstile_server.rendering.call_formats.base import BaseFormat, read_attempts
from turnstile_server.rendering.call_formats.checked_calls import checked
from turnstile_server.rendering.call_formats.json_text import NUMBER, skip
from turnstile_server.rendering.call_formats.protocol import Opening, Segment, Unread
from turnstile_server.rendering.call_formats.tool_schemas import ToolSchemas

_P = "]<]minimax[>["
_OPENING = f"{_P}<tool_call>"
_CLOSING = f"{_P}</tool_call>"
_INVOKE = re.compile(re.escape(_P) + r"<invoke name=\"(?P<name>[^\"<>]+)\">")
_TAG = re.compile(re.escape(_P) + r"<(?P<key>[^<>/\s\"]+)>")
_PLAIN = {"true": True, "false": False, "null": None}


class _NoCall(ValueError):
    """A text is no call of this form."""


class MinimaxM3(BaseFormat):
    """A ``CallFormat``."""

    openings = (Opening(_OPENING),)
    marks = (_P,)

    def read(self, text: str, offered: ToolSchemas, *, ended: bool) -> list[Segment]:
        """See ``CallFormat``."""
        return read_attempts(
            text,
            lambda position: text.find(_OPENING, position),
            lambda start: self._block(text, start, offered, ended=ended),
        )

    def _block(self, text: str, start: int, offered: ToolSchemas, *, ended: bool) -> tuple[list[Segment], int]:
        calls: list[Segment] = []
        position = skip(text, start + len(_OPENING))
        status = ParseStatus.MALFORMED
        try:
            while invoke := _INVOKE.match(text, position):
                arguments, position = self._members(text, invoke.end(), "invoke")
                notes: list[str] = []
                fitted = {
                    key: self._fitted(offered, invoke["name"], key, value, notes) for key, value in arguments
                }
                if len(fitted) != len(arguments):
                    raise _NoCall
                position = skip(text, position)
                closed = text.startswith(_CLOSING, position) or _INVOKE.match(text, position)
                if not closed and not (position == len(text) and ended):
                    raise _NoCall
                if not closed:
                    notes.append(ParseNote.END_MISSING)
                call = checked(ToolCall(invoke["name"], json.dumps(fitted, ensure_ascii=False)), offered, notes)
                if isinstance(call, ParseStatus):
                    status = call
                    raise _NoCall
                calls.append(call)
            if not calls:
                raise _NoCall
        except (_NoCall, RecursionError):
            end = text.find(_CLOSING, start)
            if end < 0:
                return [Unread(text[start:], status if ended else ParseStatus.UNCLOSED)], len(text)
            end += len(_CLOSING)
            return [Unread(text[start:end], status)], end
        return calls, position + (len(_CLOSING) if text.startswith(_CLOSING, position) else 0)

    def _members(self, text: str, position: int, name: str) -> tuple[list[tuple[str, Any]], int]:
        """The elements up to the closing tag of ``name``, and where that ends. Raises _NoCall."""
        closing = f"{_P}</{name}>"
        members: list[tuple[str, Any]] = []
        while True:
            position = skip(text, position)
            if text.startswith(closing, position):
                return members, position + len(closing)
            tag = _TAG.match(text, position)
            if tag is None:
                raise _NoCall
            value, position = self._value(text, tag)
            members.append((tag["key"], value))

    def _value(self, text: str, tag: re.Match[str]) -> tuple[Any, int]:
        """A bare text, or the elements in it as a list of pairs. Raises _NoCall."""
        closing = f"{_P}</{tag['key']}>"
        end = text.find(closing, tag.end())
        if end < 0:
            raise _NoCall
        if _TAG.match(text, skip(text, tag.end())):
            return self._members(text, tag.end(), tag["key"])
        return text[tag.end() : end], end + len(closing)

    def _fitted(self, offered: ToolSchemas, tool: str, key: str, value: Any, notes: list[str]) -> Any:
        if isinstance(value, str):
            fitted, taken = offered.valued(tool, key, value)
            notes += taken
            return fitted
        if not offered.declares(tool, key) and tool in offered:
            notes.append(ParseNote.UNDECLARED_PARAMETER)
        return _built(value)


def _built(value: Any) -> Any:
    """A list or an object of nested elements."""
    if isinstance(value, str):
        if value in _PLAIN:
            return _PLAIN[value]
        return json.loads(value) if NUMBER.fullmatch(value) else value
    if all(key == "item" for key, _ in value):
        return [_built(each) for _, each in value]
    built = {key: _built(each) for key, each in value}
    if len(built) != len(value):
        raise _NoCall
    return built
