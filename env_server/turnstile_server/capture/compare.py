"""The second step of matching: compares a stored message with the one that the agent sent.

Only the model's own replies are compared with tolerance, and each tolerance has a name (``Cosmetic``). System,
user and tool messages, and assistant messages that the model did not sample, are equal or edited.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from math import isfinite
from typing import Any

import orjson

from turnstile.models import Message, ToolCall


class Cosmetic(StrEnum):
    """Differences that do not make a message another one, by the names under which they are counted."""

    TEXT_TRIMMED = "text_trimmed"
    REASONING_DROPPED = "reasoning_dropped"
    REASONING_CHANGED = "reasoning_changed"
    ARGUMENTS_RESERIALISED = "arguments_reserialised"
    ARGUMENTS_DEFAULTS_FILLED = "arguments_defaults_filled"
    ARGUMENTS_WHITESPACE_STRIPPED = "arguments_whitespace_stripped"
    CALLS_AS_TEXT = "calls_as_text"
    """The client wrote the calls of a reply into its text (``flattened_calls``)."""
    SYSTEM_VOLATILE = "system_volatile"
    """In system or developer text, not in a reply: what a volatile pattern of the agent's spec matches."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """The result for two messages.

    ``edited``: the path inside the message where the first real difference is, None when there is none.
    ``cosmetic``: the tolerances that were needed.
    """

    edited: str | None = None
    cosmetic: frozenset[Cosmetic] = field(default=frozenset())


SAME = Comparison()
Schemas = Mapping[str, Mapping[str, Any]]
"""Tool name to the JSON schema of its arguments."""

MOST_COMPARED_VALUES = 10_000
"""Values of arguments that are compared with every tolerance, on the event loop: 4 µs each. Of larger ones only
the order of keys, spaces and escapes may differ."""

_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


def compare_foreign(stored: Message, incoming: Message) -> Comparison:
    """Compares messages that the model did not sample: equal up to ids, or edited."""
    if stored.role != incoming.role:
        return Comparison(edited="role")
    if stored.content != incoming.content:
        return Comparison(edited="content")
    if (stored.name or "") != (incoming.name or ""):
        return Comparison(edited="name")
    if (stored.reasoning or "") != (incoming.reasoning or ""):
        return Comparison(edited="reasoning")
    if len(stored.tool_calls) != len(incoming.tool_calls):
        return Comparison(edited="tool_calls")
    for index, (ours, theirs) in enumerate(zip(stored.tool_calls, incoming.tool_calls, strict=True)):
        if (ours.name, ours.arguments) != (theirs.name, theirs.arguments):
            return Comparison(edited=f"tool_calls[{index}]")
    return SAME


def compare_reply(stored: Message, incoming: Message, schemas: Schemas) -> Comparison:
    """Compares a reply of the model with what the agent sent back. ``schemas``: for defaults in arguments."""
    if incoming.role != "assistant":
        return Comparison(edited="role")
    kinds: set[Cosmetic] = set()
    if stored.content != incoming.content:
        if stored.content.strip() != incoming.content.strip():
            return Comparison(edited="content")
        kinds.add(Cosmetic.TEXT_TRIMMED)
    if len(stored.tool_calls) != len(incoming.tool_calls):
        return Comparison(edited="tool_calls")
    for index, (ours, theirs) in enumerate(zip(stored.tool_calls, incoming.tool_calls, strict=True)):
        if ours.name != theirs.name:
            return Comparison(edited=f"tool_calls[{index}].name")
        if ours.arguments != theirs.arguments:
            kind = _compare_arguments(ours, theirs, schemas.get(ours.name, {}))
            if kind is None:
                return Comparison(edited=f"tool_calls[{index}].arguments")
            kinds |= kind
    if (stored.reasoning or "").strip() != (incoming.reasoning or "").strip():
        kinds.add(Cosmetic.REASONING_CHANGED if incoming.reasoning else Cosmetic.REASONING_DROPPED)
    return Comparison(cosmetic=frozenset(kinds)) if kinds else SAME


def _compare_arguments(ours: ToolCall, theirs: ToolCall, schema: Mapping[str, Any]) -> set[Cosmetic] | None:
    """The tolerances that make the arguments equal. None when they are edited, and when they cannot be read: not
    JSON, or nested deeper than the interpreter's stack."""
    try:
        if _has_many_values(ours.arguments) or _has_many_values(theirs.arguments):
            same = _rewritten(ours.arguments) == _rewritten(theirs.arguments)
            return {Cosmetic.ARGUMENTS_RESERIALISED} if same else None
        stored, incoming = carried(ours.arguments), carried(theirs.arguments)
        if incoming == {"input": ours.arguments}:
            # A custom tool of Responses takes one free text. The client sends that text as the only argument.
            return {Cosmetic.ARGUMENTS_RESERIALISED}
        return _compare_json(stored, incoming, schema)
    except (ValueError, RecursionError):
        return None


def _has_many_values(arguments: str) -> bool:
    """True if the text has more than ``MOST_COMPARED_VALUES`` JSON values. Raises ValueError, RecursionError."""
    if sum(map(arguments.count, ",[{")) < MOST_COMPARED_VALUES:  # each value but the first is behind one of them
        return False
    try:
        left = [orjson.loads(arguments)]
    except orjson.JSONDecodeError:  # half a surrogate pair, NaN
        left = [json.loads(arguments)]
    count = 0
    while left and count <= MOST_COMPARED_VALUES:
        one = left.pop()
        count += 1
        if isinstance(one, dict):
            left += one.values()
        elif isinstance(one, list):
            left += one
    return count > MOST_COMPARED_VALUES


def _rewritten(arguments: str) -> bytes:
    """The one form of arguments that differ in the order of keys, spaces and escapes; made in native code."""
    return orjson.dumps(orjson.loads(arguments), option=orjson.OPT_SORT_KEYS)


def carried(arguments: str) -> Any:
    """Parses arguments as a JavaScript client carries them: numbers as doubles, null for a number that is not
    finite (``1e999``, ``NaN``), U+FFFD for half a surrogate pair. Raises ValueError, RecursionError."""
    value = json.loads(arguments, parse_int=_double, parse_float=_double, parse_constant=_double)
    if not _SURROGATE.search(arguments):
        return value
    text = json.dumps(value, ensure_ascii=False)
    return json.loads(text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace"))


def _double(number: str) -> float | None:
    value = float(number)
    return value if isfinite(value) else None


def _compare_json(stored: Any, incoming: Any, schema: Mapping[str, Any]) -> set[Cosmetic] | None:
    kinds = {Cosmetic.ARGUMENTS_RESERIALISED}
    if json_equal(stored, incoming):
        return kinds
    stripped, incoming_stripped = _strip_lines(stored), _strip_lines(incoming)
    if json_equal(stripped, incoming_stripped):
        return kinds | {Cosmetic.ARGUMENTS_WHITESPACE_STRIPPED}
    filled, incoming_filled = fill_defaults(stored, schema), fill_defaults(incoming, schema)
    if json_equal(filled, incoming_filled):
        return kinds | {Cosmetic.ARGUMENTS_DEFAULTS_FILLED}
    if json_equal(_strip_lines(filled), _strip_lines(incoming_filled)):
        return kinds | {Cosmetic.ARGUMENTS_DEFAULTS_FILLED, Cosmetic.ARGUMENTS_WHITESPACE_STRIPPED}
    return None


def json_equal(left: Any, right: Any) -> bool:
    """Equality of JSON values: numbers by value (1.0 is 1), booleans only as booleans (true is not 1), keys in any
    order."""
    if isinstance(left, bool) or isinstance(right, bool):
        return left is right
    if isinstance(left, dict):
        return (
            isinstance(right, dict)
            and left.keys() == right.keys()
            and all(json_equal(value, right[key]) for key, value in left.items())
        )
    if isinstance(left, list):
        return (
            isinstance(right, list)
            and len(left) == len(right)
            and all(json_equal(*pair) for pair in zip(left, right, strict=True))
        )
    return bool(left == right)


def _strip_lines(value: Any) -> Any:
    """``value`` without trailing whitespace in the lines of its strings: some agents tidy code in arguments."""
    if isinstance(value, str):
        return "\n".join(line.rstrip() for line in value.split("\n")).rstrip()
    if isinstance(value, dict):
        return {key: _strip_lines(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_strip_lines(item) for item in value]
    return value


def fill_defaults(value: Any, schema: Any) -> Any:
    """``value`` with the ``default`` of every absent property of ``schema`` filled in, at any depth."""
    if not isinstance(schema, Mapping):
        return value
    if isinstance(value, list):
        return [fill_defaults(item, schema.get("items")) for item in value]
    properties = schema.get("properties")
    if not isinstance(value, dict) or not isinstance(properties, Mapping):
        return value
    filled = {key: fill_defaults(item, properties.get(key)) for key, item in value.items()}
    for key, sub in properties.items():
        if key not in filled and isinstance(sub, Mapping) and "default" in sub:
            filled[key] = fill_defaults(sub["default"], sub)
    return filled
