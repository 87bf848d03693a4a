"""JSON as Google's interfaces read it: fields by their camelCase or snake_case name, one item for a list of one.

Both are the rules of proto3's JSON mapping (https://protobuf.dev/programming-guides/json/) and of the front end
before it; official clients mix the spellings within one body. Only fields of the interface are read this way,
never what a user wrote (arguments, results, JSON schemas). Errors name fields in camelCase.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from turnstile_server.errors import InvalidRequest
from turnstile_server.gate.dialects.json import kind, objects

_UNDERSCORE = re.compile(r"(?<=[a-z0-9])_([a-z0-9])")


def camel(source: Mapping[str, Any]) -> dict[str, Any]:
    """``source`` with its own keys in camelCase, in order; of a field in both spellings, that one counts."""
    named: dict[str, Any] = {}
    for key, value in source.items():
        name = _UNDERSCORE.sub(lambda found: found[1].upper(), key) if "_" in key else key
        if name == key or name not in source:
            named[name] = value
    return named


def item(source: Mapping[str, Any], key: str, where: str = "") -> dict[str, Any]:
    """An optional object field; absent or null is empty."""
    value = source.get(key)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise InvalidRequest(f"{where}{key} must be an object, not {kind(value)}")
    return camel(value)


def items(source: Mapping[str, Any], key: str, where: str = "") -> list[dict[str, Any]]:
    """An optional array of objects, keys as they came; one object is an array of it."""
    value = source.get(key)
    return [value] if isinstance(value, dict) else objects(source, key, where)
