"""Gemini's JSON: fields in either spelling, tools, tool choice and schemas.

(https://ai.google.dev/api/caching#Tool) Fields are read by proto3's JSON mapping
(https://protobuf.dev/programming-guides/json/): camelCase or snake_case, and one object where a list of one is
meant. Official clients mix the spellings within one body. Only fields of the interface are read this way, never
what a user wrote (arguments, results, JSON schemas). Errors name fields in camelCase.

A schema in Gemini's subset of OpenAPI becomes JSON schema: types in lower case, ``nullable`` as a null type,
counts that came as strings as numbers, and ``type`` first, where other dialects' tools have it (Google's Python
package sorts it last). A JSON schema stays as it came.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

from turnstile.models import Tool
from turnstile_server.errors import InvalidRequest
from turnstile_server.gate.dialects.base import ToolOffer
from turnstile_server.gate.dialects.json import kind, objects, text
from turnstile_server.gate.dialects.tool_choice import CallChoice, forced

_UNDERSCORE = re.compile(r"(?<=[a-z0-9])_([a-z0-9])")

_COUNTS = ("minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties")
_WHOLE_NUMBER = re.compile(r"[0-9]{1,19}")
"""An int64 as proto3's JSON mapping writes it in a string. Any other string stays as it came."""
_SCHEMAS = ("items", "additionalProperties")
_LISTS_OF_SCHEMAS = ("anyOf", "oneOf", "allOf", "prefixItems")
_NOT_JSON_SCHEMA = ("nullable", "propertyOrdering")


def camel(source: Mapping[str, Any]) -> dict[str, Any]:
    """``source`` with its own keys in camelCase, in order.

    Of a field in both spellings, the camelCase one counts.
    """
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


def read_tools(source: Mapping[str, Any]) -> ToolOffer:
    """The tools to offer; Google's own are kept apart by name. Raises InvalidRequest, which names the field."""
    offer = ToolOffer()
    for index, entry in enumerate(items(source, "tools")):
        kinds = camel(entry)
        google = (name for name, value in kinds.items() if name != "functionDeclarations" and value is not None)
        offer.hosted += [name for name in google if name not in offer.hosted]
        for at, declared in enumerate(items(kinds, "functionDeclarations", f"tools[{index}].")):
            where = f"tools[{index}].functionDeclarations[{at}]"
            offer.add(_tool(camel(declared), where), where)
    return offer


def _tool(declared: dict[str, Any], where: str) -> Tool:
    name = text(declared, "name", f"{where}.")
    if not name:
        raise InvalidRequest(f"{where}.name is missing")
    function: dict[str, Any] = {"name": name}
    description = text(declared, "description", f"{where}.")
    if description is not None:
        function["description"] = description
    parameters = declared.get("parametersJsonSchema")
    if parameters is None:
        parameters = json_schema(declared.get("parameters"))
    if parameters is not None:
        if not isinstance(parameters, dict):
            raise InvalidRequest(f"{where}.parameters must be an object, not {kind(parameters)}")
        function["parameters"] = parameters
    return Tool(name=name, spec={"type": "function", "function": function})


def call_choice(source: Mapping[str, Any], offered: Collection[str]) -> CallChoice:
    """What the model may call; ``offered``: names of the tools. Raises InvalidRequest for a request that restricts
    calls to several of them.

    ``VALIDATED`` is taken as ``AUTO``: the model chooses between a call and text. Its promise that arguments fit
    their schema is not kept, because a grammar would change what the policy samples.
    """
    config = item(item(source, "toolConfig"), "functionCallingConfig", "toolConfig.")
    where = "toolConfig.functionCallingConfig"
    mode = (text(config, "mode", f"{where}.") or "AUTO").upper()
    if mode not in ("AUTO", "VALIDATED", "NONE", "ANY", "MODE_UNSPECIFIED"):
        raise InvalidRequest(f"{where}.mode {mode!r} is not accepted; send AUTO, ANY, VALIDATED or NONE")
    allowed = config.get("allowedFunctionNames")
    if mode == "ANY" and (not allowed or (isinstance(allowed, list) and len(allowed) == 1)):
        return forced(allowed[0] if allowed else "", offered, f"{where}.mode ANY")
    if mode != "NONE" and allowed:
        raise InvalidRequest(
            f"{where}.allowedFunctionNames is not accepted: offer only the tools that may be called"
        )
    return CallChoice(may=mode != "NONE")


def json_schema(schema: Any) -> Any:
    """A schema of Gemini's as JSON schema. A value that is no object comes back as it is."""
    if not isinstance(schema, dict):
        return schema
    source = camel(schema)
    written = {
        key: _keyword(key, source[key], source)
        for key in dict.fromkeys(["type", *source] if "type" in source else source)
        if key not in _NOT_JSON_SCHEMA and not (key == "type" and source[key] == "TYPE_UNSPECIFIED")
    }
    return _nullable(written) if source.get("nullable") is True else written


def _keyword(key: str, value: Any, source: Mapping[str, Any]) -> Any:
    if key == "type":
        return [_type(one) for one in value] if isinstance(value, list) else _type(value)
    if key in _COUNTS and isinstance(value, str) and _WHOLE_NUMBER.fullmatch(value):
        return int(value)
    if key in _SCHEMAS:
        return json_schema(value)
    if key in _LISTS_OF_SCHEMAS and isinstance(value, list):
        return [json_schema(one) for one in value]
    if key == "properties" and isinstance(value, dict):
        return {name: json_schema(value[name]) for name in _ordered(value, source.get("propertyOrdering"))}
    return value


def _type(value: Any) -> Any:
    return value.lower() if isinstance(value, str) else value


def _ordered(properties: Mapping[str, Any], ordering: Any) -> list[str]:
    """The names of ``properties``: first those that ``ordering`` names, in its order."""
    first = [name for name in ordering if isinstance(name, str)] if isinstance(ordering, list) else []
    return [name for name in dict.fromkeys([*first, *properties]) if name in properties]


def _nullable(written: dict[str, Any]) -> dict[str, Any]:
    if isinstance(written.get("type"), str):
        written["type"] = [written["type"], "null"]
    elif isinstance(written.get("anyOf"), list):
        written["anyOf"] = [*written["anyOf"], {"type": "null"}]
    if isinstance(written.get("enum"), list) and None not in written["enum"]:
        written["enum"] = [*written["enum"], None]
    return written
