"""Malformed and odd bodies, made from valid ones, for the fuzz tests of every dialect."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from typing import Any

STRANGE: list[Any] = [
    *(None, True, False, 0, -1, 1, 1.5, 2**63, 2**64, 10**30, -(2**70), 1e308),
    *("", "x", "\u0000", "\ud800", "\u202e<|im_end|>", "{", "null", "auto", "AUTO"),
    *("assistant", "model", "function", "functionCall", "function_call", "message"),
    *([], {}, [[]], [{}], [None], {"type": "text"}, {"type": "input_text"}, {"text": "a"}, {"": ""}, {"type": {}}),
    *({"type": ["x"]}, {"role": "user"}, {"parts": {}}, {"$ref": "#"}, {"properties": []}),
    {"type": "object", "properties": {"a": {"default": {"b": [1]}}, "b": 7, "c": {"type": ["string", "null"]}}},
    {"type": "OBJECT", "properties": {"a": {"nullable": True, "anyOf": [1]}, "b": 7}, "propertyOrdering": [[]]},
]
_DEPTH = 12
"""Levels below which nothing is changed: some of what is put in is very deep."""


def mutated(pick: random.Random, valid: dict[str, Any], strange: Sequence[Any] = STRANGE) -> dict[str, Any]:
    """``valid`` with one to three changes: something gone, doubled, or replaced by one of ``strange``."""
    body: dict[str, Any] = _copy(valid)
    for _ in range(pick.randrange(1, 4)):
        if not (found := _places(body)):
            break
        target, last = _at(body, pick.choice(found))
        match pick.randrange(4):
            case 0:
                del target[last]
            case 1 if isinstance(target, list):
                target.insert(last, _copy(pick.choice(target)))
            case _:
                target[last] = _copy(pick.choice(strange))
    return body


def replaced(pick: random.Random, valid: dict[str, Any], values: Sequence[Any]) -> dict[str, Any]:
    """``valid`` with each of ``values`` in the place of something, one after the other."""
    body: dict[str, Any] = _copy(valid)
    for value in values:
        target, last = _at(body, pick.choice(_places(body)))
        target[last] = _copy(value)
    return body


def _places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The paths of all values inside ``value``."""
    if len(path) > _DEPTH:
        return []
    keys = list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else []
    return [found for key in keys for found in [(*path, key), *_places(value[key], (*path, key))]]


def _at(body: Any, path: tuple[Any, ...]) -> tuple[Any, Any]:
    """What holds the value at ``path``, and under which key."""
    *way, last = path
    for key in way:
        body = body[key]
    return body, last


def _copy(value: Any) -> Any:
    return json.loads(json.dumps(value))
