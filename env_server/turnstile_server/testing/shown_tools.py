"""Tools as chat templates show them to a model, read back: one function for each way.

JSON objects: most templates. Elements: Qwen3-Coder and Nemotron 3. TypeScript: gpt-oss
(https://github.com/openai/harmony, ``docs/format.md``).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

ShownTools = Mapping[str, Mapping[str, Any]]
"""Tools by name, each ``{"name", "description", "parameters"}``."""

_LIST = re.compile(r".*<tools>\n(.*?)(?:\n</tools>|$)", re.DOTALL)
_ELEMENT = re.compile(r"<function>\s*<name>(.*?)</name>(.*?)</function>", re.DOTALL)
_PARAMETER = re.compile(r"<parameter>\s*<name>(.*?)</name>(.*?)</parameter>", re.DOTALL)
_TYPE = re.compile(r"^type ([\w.-]+) = \(_: \{\n(.*?)\n?\}\) => any;", re.DOTALL | re.MULTILINE)
_FIELD = re.compile(r"^([\w.-]+)(\??): (.+?),?(?: *//.*)?$", re.MULTILINE)


def listed_tools(text: str) -> ShownTools:
    """One JSON object a line between ``<tools>`` tags. The last list counts, because a template writes it after
    the caller's text."""
    found = _LIST.match(text)
    return {} if found is None else _named(map(_parsed, found[1].split("\n")))


def json_tools(text: str) -> ShownTools:
    """JSON objects with a name and parameters, wherever they stand."""
    return _named(_objects(text))


def element_tools(text: str) -> ShownTools:
    """``<function><name>…</name>`` with a ``<parameter>`` element for each parameter."""
    tools = {}
    for name, body in _ELEMENT.findall(text):
        properties = {
            key: {"type": _inside(rest, "type"), "description": _inside(rest, "description")}
            for key, rest in _PARAMETER.findall(body)
        }
        required = _parsed(_inside(body[body.rfind("</parameter>") + 1 :], "required"))
        schema = {"type": "object", "properties": properties, "required": required or []}
        description = _inside(body.partition("<parameters>")[0], "description")
        tools[name] = {"name": name, "description": description, "parameters": schema}
    return tools


def typescript_tools(text: str) -> ShownTools:
    """``type NAME = (_: {…}) => any;`` with the description in comments before it."""
    tools = {}
    for found in _TYPE.finditer(text):
        name, fields = found[1], _FIELD.findall(found[2])
        properties = {key: _typescript(kind) for key, _, kind in fields}
        required = [key for key, optional, _ in fields if not optional]
        schema = {"type": "object", "properties": properties, "required": required}
        description = _comment_before(text, found.start())
        tools[name] = {"name": name, "description": description, "parameters": schema}
    return tools


WAYS: tuple[Callable[[str], ShownTools], ...] = (listed_tools, json_tools, element_tools, typescript_tools)


def _comment_before(text: str, end: int) -> str:
    """The lines of comment that end at ``end``, where a line begins."""
    lines: list[str] = []
    while end > 0 and text.startswith("//", start := text.rfind("\n", 0, end - 1) + 1):
        lines.append(text[start + 2 : end - 1].strip())
        end = start
    return "\n".join(reversed(lines))


def _typescript(kind: str) -> dict[str, Any]:
    words = re.findall(r"\"([^\"]*)\"", kind)
    if words:
        return {"type": "string", "enum": words}
    if kind.endswith("[]"):
        return {"type": "array", "items": {"type": kind[:-2]}}
    return {"type": kind.partition(" ")[0]}


def _inside(text: str, tag: str) -> str:
    """The text of the first such element, empty without one."""
    found = re.search(rf"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
    return found[1].strip() if found else ""


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _objects(text: str) -> Iterator[Any]:
    """The tools among the JSON objects of a text, those inside other objects included."""
    decoder = json.JSONDecoder()
    place = text.find("{")
    while place >= 0:
        try:
            value, end = decoder.raw_decode(text, place)
        except (ValueError, RecursionError):
            value, end = None, place + 1
        if _function(value) is None:
            end = place + 1
        else:
            yield value
        place = text.find("{", end)


def _named(values: Iterator[Any]) -> ShownTools:
    functions = [function for value in values if (function := _function(value)) is not None]
    return {function["name"]: function for function in functions}


def _function(value: Any) -> Mapping[str, Any] | None:
    """The function of a tool: the object itself, or its member ``function``. Examples of calls, which templates
    show too, have a name and arguments alone."""
    function = value.get("function", value) if isinstance(value, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        return None
    described = "description" in function or "parameters" in function
    return function if described and isinstance(function.get("parameters", {}), dict) else None
