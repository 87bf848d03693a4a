"""Formats in which a call is the whole reply: nothing marks it, so an answer that is JSON has to be told from one.

A reply is calls if all of it is objects with a name and parameters and no other members. Anything else is text,
unchanged; only what surely began as a call (``{"name": …``) and cannot be read counts as an attempt.
"""

from __future__ import annotations

import ast
import json
import re

from turnstile.models import ParseStatus, ToolCall
from turnstile_server.rendering.call_formats.base import BaseFormat
from turnstile_server.rendering.call_formats.checked_calls import call_of, checked
from turnstile_server.rendering.call_formats.json_text import NotJson, Value, members_at, skip
from turnstile_server.rendering.call_formats.protocol import Called, Opening, Segment, Shown, Unread
from turnstile_server.rendering.call_formats.tool_schemas import ToolSchemas

_MEMBERS = {"name", "parameters", "arguments", "type"}
_ATTEMPT = re.compile(r"\[?\s*\{\s*\"(?:name|type)\"\s*:")


class Llama3(BaseFormat):
    """Llama 3.1 to 3.3: ``{"name": …, "parameters": {…}}``, perhaps behind ``<|python_tag|>``.

    Several stand one after another, often with ``;`` between. Built-in tools are
    ``<|python_tag|>NAME.call(k="v")``.
    """

    openings = (Opening("<|python_tag|>"), Opening("{", first=True))
    marks = ("<|python_tag|>",)

    def read(self, text: str, offered: ToolSchemas, *, ended: bool) -> list[Segment]:
        """See ``CallFormat``."""
        tagged = text.startswith("<|python_tag|>")
        written = text.removeprefix("<|python_tag|>")
        calls = _calls(written, offered, separators=";,", arguments=("parameters", "arguments"))
        if calls is None and tagged:
            calls = _built_in(written, offered)
        if isinstance(calls, list):
            return calls
        if tagged or _ATTEMPT.match(text):
            return [Unread(text, calls or (ParseStatus.MALFORMED if ended else ParseStatus.UNCLOSED))]
        return [Shown(text)]


class BareList(BaseFormat):
    """xLAM: ``[{"name": …, "arguments": {…}}, …]`` as the whole reply."""

    openings = (Opening("[", first=True),)
    marks = ()

    def read(self, text: str, offered: ToolSchemas, *, ended: bool) -> list[Segment]:
        """See ``CallFormat``."""
        inside = text.strip()
        calls: list[Segment] | ParseStatus | None = None
        if inside.startswith("[") and inside.endswith("]"):
            calls = _calls(inside[1:-1], offered, separators=",", arguments=("arguments", "parameters"))
        if isinstance(calls, list):
            return calls
        if _ATTEMPT.match(text):
            return [Unread(text, calls or (ParseStatus.MALFORMED if ended else ParseStatus.UNCLOSED))]
        return [Shown(text)]


def _calls(
    text: str, offered: ToolSchemas, *, separators: str, arguments: tuple[str, ...]
) -> list[Segment] | ParseStatus | None:
    """The calls that all of ``text`` is; None where it is something else; why the calls are none."""
    objects: list[dict[str, Value]] = []
    position = skip(text, 0)
    while position < len(text):
        try:
            members, end = members_at(text, position)
        except NotJson:
            return None
        if not {"name"} < set(members) <= _MEMBERS or not set(arguments) & set(members):
            return None
        objects.append(members)
        position = skip(text, end)
        if text[position : position + 1] and text[position] in separators:
            position = skip(text, position + 1)
    calls: list[Segment] = []
    for members in objects:
        call = call_of(members, offered, arguments=arguments)
        if isinstance(call, ParseStatus):
            return call
        calls.append(call)
    return calls or None


def _built_in(text: str, offered: ToolSchemas) -> list[Segment] | ParseStatus | None:
    """A call of a built-in tool, ``NAME.call(k="v")``."""
    try:
        node = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    if not (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "call"
        and isinstance(node.func.value, ast.Name)
        and not node.args
    ):
        return None
    arguments: dict[str, object] = {}
    for keyword in node.keywords:
        if keyword.arg is None or not isinstance(keyword.value, ast.Constant):
            return None
        arguments[keyword.arg] = keyword.value.value
    try:
        written = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError):
        return None
    call = checked(ToolCall(node.func.value.id, written), offered, ())
    return [call] if isinstance(call, Called) else call
