"""Tools of OpenAI Responses, and how a call's name, namespace and free text go to the model and back.

The model is offered functions only: a tool in a namespace under the joined name, a custom tool as a function
with the one string argument ``input``. What a call looks like on the wire follows from the call and the tool
alone, so an item of a history reads the same whatever is offered beside it.
(https://platform.openai.com/docs/api-reference/responses/create#responses-create-tools)
"""

from __future__ import annotations

from typing import Any

import orjson

from turnstile.models import Tool
from turnstile_server.errors import InvalidRequest
from turnstile_server.gate.dialects.base import ToolOffer, WireTool
from turnstile_server.gate.dialects.json import kind, objects, text

_JOINT = "__"
_INPUT = "input"


def offered(source: dict[str, Any]) -> ToolOffer:
    """The tools to offer; types of hosted tools are kept apart. Raises InvalidRequest."""
    offer = ToolOffer()
    for index, item in enumerate(objects(source, "tools")):
        where = f"tools[{index}]"
        if item.get("type") == "namespace":
            namespace = _name(item, where)
            for inner, tool in enumerate(objects(item, "tools", f"{where}.")):
                _add(offer, tool, f"{where}.tools[{inner}]", namespace)
        else:
            _add(offer, item, where, None)
    return offer


def joined(namespace: str | None, name: str) -> str:
    """The name that the model sees."""
    return f"{namespace}{_JOINT}{name}" if namespace else name


def custom_arguments(written: str) -> str:
    """A custom call's input as the arguments of the function that the model sees."""
    return orjson.dumps({_INPUT: written}).decode()


def custom_input(arguments: str) -> str:
    """The input in a call of a custom tool.

    Arguments of another form come back as they are, so that the agent's reply shows the model its mistake.
    """
    try:
        value = orjson.loads(arguments)
    except orjson.JSONDecodeError:  # a parser of calls accepts numbers and surrogates that are not strict JSON
        return arguments
    written = value.get(_INPUT) if isinstance(value, dict) and len(value) == 1 else None
    return written if isinstance(written, str) else arguments


def _add(offer: ToolOffer, item: dict[str, Any], where: str, namespace: str | None) -> None:
    match item.get("type"):
        case "function":
            function = _function(item, where)
        case "custom":
            function = _custom(item, where)
        case str(hosted):
            offer.hosted.append(hosted)
            return
        case other:
            raise InvalidRequest(f"{where}.type must be a string, not {kind(other)}")
    bare = function["name"]
    name = function["name"] = joined(namespace, bare)
    offer.add(Tool(name=name, spec={"type": "function", "function": function}), where)
    if namespace or item["type"] == "custom":
        offer.wire_tools[name] = WireTool(bare, namespace, custom=item["type"] == "custom")


def _function(item: dict[str, Any], where: str) -> dict[str, Any]:
    """The function that the model is offered.

    ``strict`` is left out: nothing here enforces it, and clients send the same tool with and without it.
    """
    function: dict[str, Any] = {"name": _name(item, where)}
    description = text(item, "description", f"{where}.")
    if description is not None:
        function["description"] = description
    parameters = item.get("parameters")
    if parameters is not None:
        if not isinstance(parameters, dict):
            raise InvalidRequest(f"{where}.parameters must be an object, not {kind(parameters)}")
        function["parameters"] = parameters
    return function


def _custom(item: dict[str, Any], where: str) -> dict[str, Any]:
    description = "\n\n".join(filter(None, (text(item, "description", f"{where}."), _grammar(item, where))))
    function: dict[str, Any] = {"name": _name(item, where)}
    if description:
        function["description"] = description
    function["parameters"] = {
        "type": "object",
        "properties": {_INPUT: {"type": "string"}},
        "required": [_INPUT],
        "additionalProperties": False,
    }
    return function


def _grammar(item: dict[str, Any], where: str) -> str | None:
    """The format in words for the model; nothing enforces it."""
    wanted = item.get("format")
    if wanted is None:
        return None
    if not isinstance(wanted, dict):
        raise InvalidRequest(f"{where}.format must be an object, not {kind(wanted)}")
    definition = text(wanted, "definition", f"{where}.format.")
    if not definition:
        return None
    syntax = text(wanted, "syntax", f"{where}.format.") or ""
    return f"The input must match this {syntax} grammar:\n{definition}"


def _name(item: dict[str, Any], where: str) -> str:
    name = text(item, "name", f"{where}.")
    if not name:
        raise InvalidRequest(f"{where}.name is missing")
    return name
