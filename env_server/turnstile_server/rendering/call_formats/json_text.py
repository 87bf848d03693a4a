"""JSON as models write it: values with the slices that they were written as.

Strict but for one slip that is read in one way only: raw control characters inside a string (a line break in a
command). ``NaN`` and ``Infinity``, which Python's parser takes and JSON has not, are refused, and so is a repeated
key.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from turnstile.models import ParseNote, ParseStatus, ToolCall
from turnstile_server.rendering.call_formats.protocol import Called
from turnstile_server.rendering.call_formats.tool_schemas import ToolSchemas

SPACE = " \t\n\r"


class NotJson(ValueError):
    """A text is no JSON value."""

    status = ParseStatus.INVALID_JSON


class NotMembers(NotJson):
    """A text is a JSON value, and no object with one value for each key."""

    status = ParseStatus.MALFORMED


def _refuse(name: str) -> None:
    raise NotJson(name)


def _unrepeated(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise NotMembers("a key is repeated")
    return found


_STRICT = json.JSONDecoder(parse_constant=_refuse, object_pairs_hook=_unrepeated)
_LOOSE = json.JSONDecoder(parse_constant=_refuse, object_pairs_hook=_unrepeated, strict=False)


@dataclass(frozen=True, slots=True)
class Value:
    """A value, the text that it was written as, and where that ends in the whole text.

    ``raw_controls``: strings in it hold raw control characters, so the text is no JSON as it stands.
    """

    value: Any
    text: str
    end: int
    raw_controls: bool = False

    @property
    def json(self) -> str:
        """The value as JSON: as it was written where that is JSON."""
        return json.dumps(self.value, ensure_ascii=False) if self.raw_controls else self.text


def skip(text: str, position: int) -> int:
    """The next place that is no white space."""
    while position < len(text) and text[position] in SPACE:
        position += 1
    return position


def value_at(text: str, position: int) -> Value:
    """The value that begins at ``position``, white space aside. Raises NotJson."""
    start = skip(text, position)
    failure: Exception = NotJson("no value")
    for decoder, loose in ((_STRICT, False), (_LOOSE, True)):
        try:
            value, end = decoder.raw_decode(text, start)
        except NotMembers:
            raise
        except (ValueError, RecursionError) as error:
            failure = error
            continue
        return Value(value, text[start:end], end, loose)
    raise NotJson(str(failure))


def members_at(text: str, position: int) -> tuple[dict[str, Value], int]:
    """The members of the object at ``position`` with their slices, and where it ends. Raises NotJson."""
    whole = value_at(text, position)
    if not isinstance(whole.value, dict):
        raise NotMembers("not an object")
    members: dict[str, Value] = {}
    position = skip(text, skip(text, position) + 1)
    while text[position] != "}":
        key = value_at(text, position)
        position = skip(text, key.end) + 1
        member = value_at(text, position)
        members[key.value] = member
        position = skip(text, member.end)
        if text[position] == ",":
            position = skip(text, position + 1)
    return members, whole.end


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
            inner = value_at(arguments.value, 0)
        except NotJson:
            return ParseStatus.MALFORMED
        if not isinstance(inner.value, dict) or skip(arguments.value, inner.end) != len(arguments.value):
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
    if offered.strict and any(note != ParseNote.UNDECLARED_PARAMETER for note in taken):
        return ParseStatus.MALFORMED
    return Called(call, tuple(taken))
