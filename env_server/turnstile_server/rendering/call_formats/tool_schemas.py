"""The tools that a call may name, and the values that their schemas take.

Formats that write values without quotes leave it to the schema what a value is. The rule, for a text and the
schema of its parameter:

- A schema that takes strings and nothing else, or that says nothing of types, takes the text as it stands.
- Else the text is the first of these that the schema takes: null, a boolean, an integer, a number, an array, an
  object. Where strings are taken as well, only null, arrays and objects are preferred to them: ``123`` for
  ``["string", "integer"]`` stays a string.
- A text that fits nothing is a string as it stands: a value is never dropped and never guessed.

Python's ``True``, ``False`` and ``None``, and its literals for arrays and objects, are read as JSON's: templates
of the Qwen3-Coder family write them.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from math import isfinite
from typing import Any

from turnstile.models import ParseNote, Tool
from turnstile_server.rendering.call_formats.json_text import NUMBER, NotJson, NotMembers, whole_value

_INTEGER = re.compile(r"-?(?:0|[1-9][0-9]*)")
_WORDS: dict[str, tuple[str, Any]] = {
    "null": ("null", None),
    "None": ("null", None),
    "true": ("boolean", True),
    "True": ("boolean", True),
    "false": ("boolean", False),
    "False": ("boolean", False),
}
_PYTHON = ("None", "True", "False")
_MOST_REFERENCES = 16
"""Steps from a ``$ref`` to a schema that is none."""


class ToolSchemas:
    """The tools of one model call by name. Immutable.

    ``strict``: a call that was read with a liberty is none. ``forbidden``: no call is one.
    """

    def __init__(self, tools: Sequence[Tool], *, strict: bool = False, forbidden: bool = False) -> None:
        self._parameters = {tool.name: tool.parameters for tool in tools}
        self.strict = strict
        self.forbidden = forbidden

    def __contains__(self, name: object) -> bool:
        return name in self._parameters

    def __iter__(self) -> Iterator[str]:
        return iter(self._parameters)

    def schema(self, tool: str, parameter: str) -> Mapping[str, Any] | None:
        """The schema of a parameter; None where the tool does not declare it."""
        root = self._parameters.get(tool, {})
        properties = root.get("properties")
        found = properties.get(parameter) if isinstance(properties, Mapping) else None
        return _resolved(found, root) if isinstance(found, Mapping) else None

    def declares(self, tool: str, parameter: str) -> bool:
        """True where the tool declares the parameter."""
        return self.schema(tool, parameter) is not None

    def valued(self, tool: str, parameter: str, text: str, *, python: bool = False) -> tuple[Any, tuple[str, ...]]:
        """The value that a text without quotes stands for, and the liberties that were taken. ``python``: Python's
        literals are the format's own."""
        schema = self.schema(tool, parameter)
        if schema is None:
            return text, (ParseNote.UNDECLARED_PARAMETER,) if tool in self else ()
        types = self._types(schema, tool)
        if not types or types == {"string"}:
            return text, ()
        value, kind = _read(text.strip(), types)
        if kind is None or ("string" in types and kind in ("boolean", "integer", "number")):
            return text, () if "string" in types else (ParseNote.VALUE_UNTYPED,)
        literal = text.strip() in _PYTHON or kind.endswith("python")
        return value, (ParseNote.PYTHON_LITERAL,) if literal and not python else ()

    def _types(self, schema: Mapping[str, Any], tool: str) -> set[str]:
        """The JSON types that a schema takes; empty where it does not say."""
        root = self._parameters.get(tool, {})
        found: set[str] = set()
        declared = schema.get("type")
        if isinstance(declared, str):
            found.add(declared)
        elif isinstance(declared, Sequence):
            found |= {name for name in declared if isinstance(name, str)}
        if found:
            return found
        for key in ("anyOf", "oneOf", "allOf"):
            parts = schema.get(key)
            for part in parts if isinstance(parts, Sequence) and not isinstance(parts, str) else ():
                if isinstance(part, Mapping):
                    found |= self._types(_resolved(part, root), tool)
        values = schema.get("enum")
        if not found and isinstance(values, Sequence) and not isinstance(values, str):
            found |= {_type_of(value) for value in values}
        if not found and "const" in schema:
            found.add(_type_of(schema["const"]))
        if not found:
            found |= {"object"} if "properties" in schema else {"array"} if "items" in schema else set()
        return found


def _resolved(schema: Mapping[str, Any], root: Mapping[str, Any]) -> Mapping[str, Any]:
    """The schema that a local ``$ref`` names; one that names none takes anything."""
    for _ in range(_MOST_REFERENCES):
        reference = schema.get("$ref")
        if not isinstance(reference, str):
            return schema
        found: Any = root if reference.startswith("#") else None
        for step in reference.lstrip("#/").split("/"):
            name = step.replace("~1", "/").replace("~0", "~")
            found = found.get(name) if isinstance(found, Mapping) else None
        if not isinstance(found, Mapping):
            return {}
        schema = found
    return {}


def _type_of(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int):
        return "integer"
    if isinstance(value, float):
        return "number"
    return "string" if isinstance(value, str) else "array" if isinstance(value, Sequence) else "object"


def _read(text: str, types: set[str]) -> tuple[Any, str | None]:
    """The value that ``text`` is, and its type, ``… python`` for a Python literal; None where no type takes it."""
    if text in _WORDS:
        kind, value = _WORDS[text]
        return (value, kind) if kind in types else (None, None)
    if types & {"integer", "number"} and (match := NUMBER.fullmatch(text)):
        number = json.loads(match.group())
        whole = _INTEGER.fullmatch(text) is not None or (isfinite(number) and number == int(number))
        if isfinite(number) and (whole or "number" in types):
            return number, "integer" if _INTEGER.fullmatch(text) else "number"
    wanted = {"[": "array", "{": "object"}.get(text[:1])
    if wanted is None or wanted not in types:
        return None, None
    try:
        return whole_value(text).value, wanted
    except NotMembers:
        return None, None
    except NotJson:
        pass
    try:
        value = ast.literal_eval(text)
        json.dumps(value, allow_nan=False)
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return None, None
    return (value, f"{wanted} python") if isinstance(value, list | dict) else (None, None)
