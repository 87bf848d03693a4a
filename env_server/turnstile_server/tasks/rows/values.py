"""Cells of rows to values: lists of tests however they are written, and templates over columns."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator, Mapping
from hashlib import sha256
from typing import Any

from turnstile.models.base import CLIENT_ID_PATTERN

_PLACE = re.compile(r"\{(\w+)(?::([^{}]*))?\}")
_ID_CHARS, _DIGEST_CHARS = 64, 12
_ENDS = 60
"""Characters of a value that is shown in a message."""


_NESTED = 3
"""How deep a row is looked for in another."""

RowFault = tuple[str | None, str]
"""A column, and what is wrong with it."""


def listed_tests(value: Any) -> tuple[str, ...]:
    """A list of test ids: a list, or one as JSON or as a Python literal in text. Raises ValueError."""
    found = value
    if isinstance(value, str):
        try:
            found = json.loads(value)
        except (ValueError, RecursionError):
            try:
                found = ast.literal_eval(value.strip())
            except (ValueError, SyntaxError, MemoryError, RecursionError):
                raise ValueError(f"{_shown(value)} is neither a list nor one as JSON or Python in text") from None
    if not isinstance(found, list | tuple):
        raise ValueError(f"{_shown(value)} is not a list of test ids")
    for one in found:
        if not isinstance(one, str) or not one:
            raise ValueError(f"{_shown(one)} in the list is no test id")
    return tuple(dict.fromkeys(found))


def nested_objects(row: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The objects in a row's columns, and in those, by dotted path, the outer ones first. An object may be JSON in
    text."""
    level: list[tuple[str, Mapping[str, Any]]] = [("", row)]
    for _ in range(_NESTED):
        level = [
            (f"{path}.{name}" if path else name, inner)
            for path, outer in level
            for name, value in outer.items()
            if (inner := _object_in(value)) is not None
        ]
        yield from ((path, dict(inner)) for path, inner in level)


def _object_in(value: Any) -> Mapping[str, Any] | None:
    if isinstance(value, str) and value.lstrip().startswith("{"):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            return None
    return value if isinstance(value, dict) else None


def filled(template: str, row: Mapping[str, Any]) -> str:
    """The template with the row's columns. ``{name:TEXT}`` is in lower case, with TEXT for every ``__``, as the
    names of images are. Raises ValueError for a column that the row does not have."""

    def value(match: re.Match[str]) -> str:
        found = row.get(match[1])
        if not isinstance(found, str | int | float):
            raise ValueError(f"the template {template!r} needs the column {match[1]!r}, which has no text here")
        return str(found) if match[2] is None else str(found).lower().replace("__", match[2])

    return _PLACE.sub(value, template)


def names_in(template: str) -> list[str]:
    """The columns that a template takes."""
    return [part.partition("}")[0].partition(":")[0] for part in template.split("{")[1:]]


def task_id(instance_id: str) -> str:
    """The instance's id where a task can have it; else what is left of it and a digest of the whole."""
    if re.fullmatch(CLIENT_ID_PATTERN, instance_id):
        return instance_id
    plain = re.sub(r"[^A-Za-z0-9_-]+", "-", instance_id).strip("-_")[: _ID_CHARS - _DIGEST_CHARS - 1]
    return f"{plain}-{sha256(instance_id.encode()).hexdigest()[:_DIGEST_CHARS]}".lstrip("-")


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _ENDS else f"{text[:_ENDS]}…"
