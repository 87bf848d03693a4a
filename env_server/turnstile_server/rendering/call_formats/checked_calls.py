"""What was read as a call, against the tools that were offered: a call with notes, or why it is none."""

from __future__ import annotations

from collections.abc import Iterable

from turnstile.models import ParseNote, ParseStatus, ToolCall
from turnstile_server.rendering.call_formats.json_text import NotJson, Value, whole_value
from turnstile_server.rendering.call_formats.protocol import Called
from turnstile_server.rendering.call_formats.tool_schemas import ToolSchemas

_ABOUT_TOOLS = frozenset({ParseNote.UNDECLARED_PARAMETER, ParseNote.VALUE_UNTYPED})
"""How a call stands to the tools, not how it was read: strict reading allows them."""


def call_of(
    members: dict[str, Value],
    offered: ToolSchemas,
    *,
    names: Iterable[str] = ("name",),
    arguments: Iterable[str] = ("arguments", "parameters"),
    ids: Iterable[str] = (),
    notes: Iterable[str] = (),
) -> Called | ParseStatus:
    """The call that an object is. ``names``, ``arguments``, ``ids``: the keys of its name, arguments and id, the
    first of each the format's own. ``notes``: liberties that were taken already."""
    found = next((members[key] for key in names if key in members), None)
    name = None if found is None else found.value
    if not isinstance(name, str) or not name:
        return ParseStatus.MALFORMED
    keys = [key for key in arguments if key in members]
    if len(keys) > 1:
        return ParseStatus.MALFORMED
    taken = list(notes)
    if keys and keys[0] != next(iter(arguments)):
        taken.append(ParseNote.ARGUMENTS_KEY)
    own = next((members[key].value for key in ids if key in members), None)
    return called(
        name, members[keys[0]] if keys else None, offered, taken, own_id=str(own) if own is not None else None
    )


def called(
    name: str,
    arguments: Value | None,
    offered: ToolSchemas,
    notes: Iterable[str] = (),
    *,
    own_id: str | None = None,
) -> Called | ParseStatus:
    """A call of ``name`` with these arguments: an object, none at all, or an object as JSON in a string."""
    taken = list(notes)
    if arguments is None or arguments.value is None:
        taken.append(ParseNote.ARGUMENTS_MISSING)
        text = "{}"
    elif isinstance(arguments.value, str):
        try:
            inner = whole_value(arguments.value)
        except NotJson:
            return ParseStatus.MALFORMED
        if not isinstance(inner.value, dict):
            return ParseStatus.MALFORMED
        taken.append(ParseNote.ARGUMENTS_ENCODED_TWICE)
        text = inner.json
    elif isinstance(arguments.value, dict):
        if arguments.raw_controls:
            taken.append(ParseNote.RAW_CONTROL_CHARACTERS)
        text = arguments.json
    else:
        return ParseStatus.MALFORMED
    return checked(ToolCall(name, text, own_id=own_id), offered, taken)


def checked(call: ToolCall, offered: ToolSchemas, notes: Iterable[str]) -> Called | ParseStatus:
    """The call with its notes; in strict reading, the reason that it is none."""
    if offered.forbidden:
        return ParseStatus.UNKNOWN_TOOL
    taken = list(dict.fromkeys(notes))
    if call.name not in offered:
        if offered.strict:
            return ParseStatus.UNKNOWN_TOOL
        taken.append(ParseNote.UNDECLARED_TOOL)
    if offered.strict and not set(taken) <= _ABOUT_TOOLS:
        return ParseStatus.MALFORMED
    return Called(call, tuple(taken))
