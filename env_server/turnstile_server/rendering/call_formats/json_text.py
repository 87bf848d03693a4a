"""JSON as models write it: values with the slices that they were written as.

Strict but for one slip that is read in one way only: raw control characters inside a string (a line break in a
command). ``NaN`` and ``Infinity``, which Python's parser takes and JSON has not, are refused, and so is a repeated
key.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

from turnstile.models import ParseStatus

SPACE = " \t\n\r"
NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")


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


def whole_value(text: str) -> Value:
    """The value that all of ``text`` is, white space aside. Raises NotJson."""
    value = value_at(text, 0)
    if skip(text, value.end) != len(text):
        raise NotJson("text behind the value")
    return value
