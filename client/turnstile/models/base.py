"""The basis of all records: their base class, their ids, and the ranges of the numbers that callers send.

A number from outside is either exact wherever it is shown again, or refused with the name of its field. JSON
itself sets no bound on numbers, so each field here has one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any

import uuid_utils
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StringConstraints

SCHEMA_VERSION = 1
"""Version of all records, on disk and on the wire."""

CLIENT_ID_PATTERN = r"^[A-Za-z0-9_-]{1,64}$"

ClientId = Annotated[str, StringConstraints(pattern=CLIENT_ID_PATTERN)]
"""An id that a caller may choose: letters, digits, ``_`` and ``-``, 1 to 64 of them."""

MAX_INT32 = 2**31 - 1
MAX_INT64 = 2**63 - 1
MAX_SECONDS = 1e9
"""The longest time that a caller may name: 31 years."""
MAX_JSON_DEPTH = 100
"""Nesting of objects and lists in free JSON. Readers of the answers stop at 200, and answers nest it deeper."""
_JSON_INTEGER_BITS = 1024

Seed = Annotated[int, Field(ge=-(2**127), lt=2**128)]
"""An integer of at most 128 bits, signed or unsigned: NumPy's ``SeedSequence().entropy`` has 128."""


class Model(BaseModel):
    """Base of the records: frozen, unknown fields refused, NumPy arrays allowed."""

    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True)


def new_id(prefix: str) -> str:
    """Return ``{prefix}_{UUIDv7 as 32 hex digits}``, e.g. ``ep_0199…``; ids sort by time of creation."""
    return f"{prefix}_{uuid_utils.uuid7().hex}"


def check_json(value: Any, *, max_depth: int = MAX_JSON_DEPTH) -> Any:
    """Return ``value`` if it is JSON that every answer can repeat exactly.

    Integers have less than 1,025 bits (the range of a double), floats are finite, strings are Unicode without lone
    surrogates, and nothing is nested deeper than ``max_depth``. Raises ValueError, naming the place.
    """
    pending: list[tuple[Any, str, int]] = [(value, "", 0)]
    while pending:
        item, place, depth = pending.pop()
        wrong = _not_json(item, depth, max_depth)
        if wrong is not None:
            raise ValueError(f"{place or 'the value'} {wrong}")
        if isinstance(item, Mapping):
            for name, inner in item.items():
                if not isinstance(name, str) or not _unicode(name):
                    raise ValueError(f"{place or 'the value'} has a name that is not Unicode text")
                pending.append((inner, _place(place, name), depth + 1))
        elif isinstance(item, list | tuple):
            pending += [(inner, _place(place, index), depth + 1) for index, inner in enumerate(item)]
    return value


def _not_json(item: Any, depth: int, max_depth: int) -> str | None:
    """The reason that JSON cannot repeat this one value, its parts aside, exactly; None if it can."""
    match item:
        case None | bool():
            return None
        case int() if item.bit_length() > _JSON_INTEGER_BITS:
            return f"is an integer of more than {_JSON_INTEGER_BITS} bits; send it as a string"
        case float() if not math.isfinite(item):
            return "is not a finite number in the range of a double"
        case str() if not _unicode(item):
            return "has a lone surrogate, which is not Unicode text"
        case int() | float() | str():
            return None
        case list() | tuple() | Mapping() if depth >= max_depth:
            return f"is nested deeper than {max_depth} levels"
        case list() | tuple() | Mapping():
            return None
        case _:
            return f"is of type {type(item).__name__}, which JSON does not have"


def _unicode(text: str) -> bool:
    return text.isascii() or not any("\ud800" <= character <= "\udfff" for character in text)


def _place(above: str, name: str | int) -> str:
    """The path to a value for an error message, cut where it gets long."""
    path = f"{above}.{name}" if above else str(name)
    return path if len(path) <= 120 else f"…{path[-119:]}"


JsonObject = Annotated[dict[str, Any], AfterValidator(check_json)]
"""An object of any JSON, within the bounds of ``check_json``."""

JsonObjects = Annotated[list[dict[str, Any]], AfterValidator(check_json)]
"""A list of such objects."""
