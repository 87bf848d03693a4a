"""The Hermes / Qwen call format: ``<tool_call>{"name": …, "arguments": {…}}</tool_call>``.

The arguments are the exact slice that the model wrote; nothing is serialised again.
"""

from __future__ import annotations

import json
from collections.abc import Collection

from turnstile.models import ParseStatus, ToolCall


class _Unusable(ValueError):
    """``NaN`` or ``Infinity``, which Python's parser accepts and JSON does not have."""


def _refuse_constant(name: str) -> None:
    raise _Unusable(name)


_DECODER = json.JSONDecoder(parse_constant=_refuse_constant)
_SPACE = " \t\n\r"


class HermesFormat:
    """A ``CallFormat``: JSON with ``name`` and ``arguments`` between ``<tool_call>`` tags."""

    opening = "<tool_call>"
    closing = "</tool_call>"

    def asked_by(self, template: str) -> bool:
        """See ``CallFormat``. Other formats use the same tags, around XML."""
        return (
            self.opening in template
            and "arguments" in template
            and "tools" in template
            and "<function=" not in template
            and "<arg_key>" not in template
        )

    def parse(self, text: str, known: Collection[str]) -> ToolCall | ParseStatus:
        """See ``CallFormat``."""
        try:
            members = _members(text)
        except (ValueError, RecursionError):
            return ParseStatus.INVALID_JSON
        if members is None:
            return ParseStatus.MALFORMED
        name, _ = members.get("name", (None, ""))
        arguments, slice_ = members.get("arguments", (None, ""))
        if not isinstance(name, str) or not name or not isinstance(arguments, dict):
            return ParseStatus.MALFORMED
        if name not in known:
            return ParseStatus.UNKNOWN_TOOL
        return ToolCall(name, slice_)


def _members(text: str) -> dict[str, tuple[object, str]] | None:
    """Top-level members with the slice each value was written as; None when it is no object, or a key repeats.

    Raises ValueError for what is not JSON.
    """
    position = _skip(text, 0)
    if text[position : position + 1] != "{":
        value, end = _DECODER.raw_decode(text, position)
        if text[end:].strip(_SPACE):
            raise ValueError("text after the value")
        return None
    members: dict[str, tuple[object, str]] = {}
    repeated = False
    position = _skip(text, position + 1)
    if text[position : position + 1] == "}":
        position += 1
    else:
        while True:
            key, position = _DECODER.raw_decode(text, position)
            if not isinstance(key, str):
                raise ValueError("a key is not a string")
            position = _expect(text, position, ":")
            start = _skip(text, position)
            value, position = _DECODER.raw_decode(text, start)
            repeated = repeated or key in members
            members[key] = (value, text[start:position])
            position = _skip(text, position)
            if text[position : position + 1] == "}":
                position += 1
                break
            position = _skip(text, _expect(text, position, ","))
    if text[position:].strip(_SPACE):
        raise ValueError("text after the object")
    return None if repeated else members


def _skip(text: str, position: int) -> int:
    while position < len(text) and text[position] in _SPACE:
        position += 1
    return position


def _expect(text: str, position: int, character: str) -> int:
    position = _skip(text, position)
    if text[position : position + 1] != character:
        raise ValueError(f"expected {character!r}")
    return position + 1
