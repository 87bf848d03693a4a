"""Prints the wire's types of the OpenEnv package that the running Python has, as JSON: schemas without prose.

    PYTHON tests/openenv/published_types.py > tests/openenv/published/types-VERSION.json

A program of its own, because the two packages that have them cannot stand in one environment.
"""

from __future__ import annotations

import importlib.metadata
import json
import sys
from enum import Enum
from typing import Any

MODELS = (
    *("Action", "Observation", "State", "Tool", "ToolError", "WSResetMessage", "WSStepMessage", "WSStateMessage"),
    *("WSCloseMessage", "WSMCPMessage", "WSObservationResponse", "WSStateResponse", "WSErrorResponse"),
    "WSMCPResponse",
)
ENUMS = ("WSErrorCode", "JsonRpcErrorCode", "ToolErrorType")


def without_prose(schema: Any) -> Any:
    """The schema without titles, descriptions and examples."""
    if isinstance(schema, dict):
        prose = ("title", "description", "examples")
        return {name: without_prose(value) for name, value in schema.items() if name not in prose}
    return [without_prose(each) for each in schema] if isinstance(schema, list) else schema


def shapes(types: dict[str, Any]) -> dict[str, Any]:
    """By the name of a type: its schema, or the values of an enumeration."""
    found: dict[str, Any] = {name: without_prose(types[name].model_json_schema()) for name in MODELS}
    for name in ENUMS:
        assert issubclass(types[name], Enum)
        found[name] = {each.name: each.value for each in types[name]}
    return found


if __name__ == "__main__":
    from openenv.core.env_server import mcp_types
    from openenv.core.env_server import types as core_types

    owner = importlib.metadata.packages_distributions()["openenv"][0]
    json.dump(
        {
            "package": f"{owner} {importlib.metadata.version(owner)}",
            "types": shapes({**vars(core_types), **vars(mcp_types)}),
        },
        sys.stdout,
        indent=1,
        sort_keys=True,
    )
    sys.stdout.write("\n")
