"""Formats whose calls are a list of Python calls with keyword arguments: ``[NAME(key=value, …), …]``.

Values are Python's literals; JSON's ``true``, ``false`` and ``null`` are read as well. A string that is not
escaped as Python escapes it (some templates write it raw) makes the whole of it text.
"""

from __future__ import annotations

import ast
import json
import re
from typing import Any, Final

from turnstile.models import ParseNote, ParseStatus, ToolCall
from turnstile_server.rendering.call_formats.base import BaseFormat, read_attempts
from turnstile_server.rendering.call_formats.checked_calls import checked
from turnstile_server.rendering.call_formats.protocol import Opening, Segment, Shown, Unread
from turnstile_server.rendering.call_formats.tool_schemas import ToolSchemas

_JSON_WORDS = {"true": True, "false": False, "null": None}
_ATTEMPT = re.compile(r"\[\s*[A-Za-z_][\w.-]*\s*\(")

_MOST_ENDS: Final = 20
"""Closing marks that are tried as the end of one list: each means to parse all that stands before it."""


class _NoCall(ValueError):
    """An expression is no list of calls with literal arguments."""


class Pythonic(BaseFormat):
    """Llama 4, ToolACE, Olmo 3: the list is the whole reply."""

    openings = (Opening("[", first=True), Opening("<|python_start|>"))
    marks = ("<|python_start|>", "<|python_end|>")

    def read(self, text: str, offered: ToolSchemas, *, ended: bool) -> list[Segment]:
        """See ``CallFormat``."""
        inside = text.removeprefix("<|python_start|>").rstrip().removesuffix("<|python_end|>")
        calls = _calls(inside, offered)
        if isinstance(calls, list):
            return calls
        if inside != text.rstrip() or _ATTEMPT.match(text):
            return [Unread(text, calls or (ParseStatus.MALFORMED if ended else ParseStatus.UNCLOSED))]
        return [Shown(text)]


class Lfm2(BaseFormat):
    """LFM2 and LFM2.5: the list stands between ``<|tool_call_start|>`` and ``<|tool_call_end|>``."""

    openings = (Opening("<|tool_call_start|>"),)
    marks = ("<|tool_call_start|>", "<|tool_call_end|>")

    def read(self, text: str, offered: ToolSchemas, *, ended: bool) -> list[Segment]:
        """See ``CallFormat``."""
        return read_attempts(
            text,
            lambda position: text.find(self.marks[0], position),
            lambda start: self._attempt(text, start, offered, ended=ended),
        )

    def _attempt(self, text: str, start: int, offered: ToolSchemas, *, ended: bool) -> tuple[list[Segment], int]:
        """The calls that begin at ``start``: up to the first closing mark before which they are an expression."""
        opening, closing = self.marks
        inside = start + len(opening)
        end = text.find(closing, inside)
        first = end
        status: ParseStatus | None = None
        for _ in range(_MOST_ENDS):
            if end < 0:
                break
            calls = _calls(text[inside:end], offered)
            if isinstance(calls, list):
                return calls, end + len(closing)
            status = status or calls
            end = text.find(closing, end + 1)
        if first < 0:
            calls = _calls(text[inside:], offered, ParseNote.END_MISSING) if ended else None
            if isinstance(calls, list):
                return calls, len(text)
            return [Unread(text[start:], calls or ParseStatus.UNCLOSED)], len(text)
        end = first + len(closing)
        return [Unread(text[start:end], status or ParseStatus.MALFORMED)], end


def _calls(text: str, offered: ToolSchemas, *notes: str) -> list[Segment] | ParseStatus | None:
    """The calls that ``text`` is; None where it is something else; why the calls are none."""
    try:
        node = ast.parse(text.strip(), mode="eval").body
        nodes = node.elts if isinstance(node, ast.List) else [node]
        read = [_call(each) for each in nodes]
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    own = () if isinstance(node, ast.List) else (ParseNote.OTHER_FORM,)
    calls: list[Segment] = []
    for call, taken in read:
        found = checked(call, offered, (*notes, *own, *taken))
        if isinstance(found, ParseStatus):
            return found
        calls.append(found)
    return calls or None


def _call(node: ast.expr) -> tuple[ToolCall, tuple[str, ...]]:
    """A call with keyword arguments. Raises _NoCall."""
    if not isinstance(node, ast.Call) or node.args:
        raise _NoCall
    arguments: dict[str, Any] = {}
    notes: list[str] = []
    for keyword in node.keywords:
        if keyword.arg is None or keyword.arg in arguments:
            raise _NoCall
        arguments[keyword.arg] = _value(keyword.value, notes)
    return ToolCall(_name(node.func), json.dumps(arguments, ensure_ascii=False, allow_nan=False)), tuple(notes)


def _name(node: ast.expr) -> str:
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return f"{_name(node.value)}.{node.attr}"
    raise _NoCall


def _value(node: ast.expr, notes: list[str]) -> Any:
    if isinstance(node, ast.Constant) and (node.value is None or isinstance(node.value, str | int | float)):
        return node.value
    if isinstance(node, ast.Name) and node.id in _JSON_WORDS:
        notes.append(ParseNote.OTHER_FORM)
        return _JSON_WORDS[node.id]
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        number = _value(node.operand, notes)
        if isinstance(number, int | float) and not isinstance(number, bool):
            return -number
    if isinstance(node, ast.List | ast.Tuple):
        return [_value(each, notes) for each in node.elts]
    if isinstance(node, ast.Dict):
        keys = [_value(each, notes) if each is not None else None for each in node.keys]
        if all(isinstance(key, str) for key in keys):
            return dict(zip(keys, [_value(each, notes) for each in node.values], strict=True))
    raise _NoCall
