"""What pydantic finds wrong with a value, in words for the person who wrote the value."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

_SAID: Final = {
    "extra_forbidden": "there is no such field",
    "missing": "it is missing",
    "model_type": "it must be a mapping of fields",
    "dataclass_type": "it must be a mapping of fields",
    "model_attributes_type": "it must be a mapping of fields",
    "dict_type": "it must be a mapping",
    "tuple_type": "it must be a list",
    "list_type": "it must be a list",
    "set_type": "it must be a list",
    "frozen_set_type": "it must be a list",
}
"""By the type of the error: these messages name classes of ours, or types of Python."""


def fault_text(item: Mapping[str, Any]) -> str:
    """One item of ``ValidationError.errors()`` as the end of a sentence, without where it is."""
    said = _SAID.get(item["type"], str(item["msg"]))
    return said.removeprefix("Value error, ").removeprefix("Assertion failed, ")
