"""Anthropic Messages, inbound (https://docs.anthropic.com/en/api/messages and …/messages-count-tokens).

Read: system, messages, tools, tool_choice, stream, max_tokens (required), stop_sequences, thinking,
output_config.format / output_format. Recorded but not obeyed (the trainer pins sampling): temperature, top_p,
top_k, effort. Hosted tools are not offered, and recorded. Refused, because obeying or ignoring it would make the
record untrue: forced tools, tools that Anthropic's own models know without a schema, threads that the provider
remembers, and everything that is not text.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from turnstile.models import Tool
from turnstile_server.errors import InvalidRequest
from turnstile_server.gate.dialects.anthropic_messages import parse_messages, parse_system
from turnstile_server.gate.dialects.base import NO_PARAMS, ModelCall
from turnstile_server.gate.dialects.json import (
    dumped,
    flag,
    kind,
    objects,
    positive_int,
    read_object,
    recorded,
    text,
)
from turnstile_server.gate.dialects.options import forced_call, stop_strings
from turnstile_server.gate.dialects.parse_cache import ParseCache

ASKED = (
    "temperature",
    "top_p",
    "top_k",
    "max_tokens",
    "stop_sequences",
    "thinking",
    "tool_choice",
    "output_config",
    "output_format",
)
"""Fields that say how to sample: recorded as asked, and part of the retry identity."""

COUNTING = "counting"
"""The part of the path that says that the prompt is only counted; such a body has no max_tokens."""

_HOSTED = ("web_search_", "web_fetch_", "code_execution_", "tool_search_tool_", "advisor_", "mcp_toolset")
"""Types of tools that the provider runs; a date follows."""


def parse_anthropic(
    body: bytes, before: ParseCache | None = None, params: Mapping[str, str] = NO_PARAMS
) -> ModelCall:
    """The call in a Messages body. Raises InvalidRequest, naming the field."""
    source = read_object(body)
    if source.get("thread") is not None:
        raise InvalidRequest("thread is not accepted: every call must name its whole history in messages")
    messages = parse_messages(objects(source, "messages"), before or ParseCache())
    if not messages:
        raise InvalidRequest("messages must have at least one message")
    max_tokens = positive_int(source, "max_tokens")
    if max_tokens is None and COUNTING not in params:
        raise InvalidRequest("max_tokens is missing: it must be a whole number above 0")
    tools, hosted = _tools(source)
    asked = recorded(source, ASKED)
    return ModelCall(
        messages=(*parse_system(source.get("system")), *messages),
        tools=tools,
        model=text(source, "model") or "",
        stream=flag(source, "stream"),
        stream_usage=True,
        max_tokens=max_tokens,
        stop=stop_strings(source.get("stop_sequences"), "stop_sequences"),
        parse_calls=_parse_calls(source.get("tool_choice")),
        json_schema=_json_schema(source),
        asked={**asked, "hosted_tools": hosted} if hosted else asked,
        show_reasoning=_show_reasoning(source.get("thinking")),
    )


def _tools(source: dict[str, Any]) -> tuple[tuple[Tool, ...], list[str]]:
    """The tools to offer, and the names of those that the provider would have run."""
    tools: dict[str, Tool] = {}
    hosted: list[str] = []
    for index, item in enumerate(objects(source, "tools")):
        where = f"tools[{index}]"
        type_ = text(item, "type", f"{where}.") or "custom"
        if type_.startswith(_HOSTED):
            hosted.append(type_)
        elif type_ != "custom":
            raise InvalidRequest(
                f"{where}: a tool of type {type_!r} has no schema that this model could read; "
                "offer it with a name, a description and an input_schema"
            )
        else:
            tool = _tool(item, where)
            if tool.name in tools:
                raise InvalidRequest(f"{where}: a tool named {tool.name!r} is offered twice")
            tools[tool.name] = tool
    servers = objects(source, "mcp_servers")
    hosted += [f"mcp_server {text(item, 'name', f'mcp_servers[{at}].')}" for at, item in enumerate(servers)]
    return tuple(tools.values()), hosted


def _tool(item: dict[str, Any], where: str) -> Tool:
    name = text(item, "name", f"{where}.")
    if not name:
        raise InvalidRequest(f"{where}.name is missing")
    schema = item.get("input_schema")
    if not isinstance(schema, dict):
        raise InvalidRequest(f"{where}.input_schema must be an object, not {kind(schema)}")
    function: dict[str, Any] = {"name": name}
    description = text(item, "description", f"{where}.")
    if description is not None:
        function["description"] = description
    function["parameters"] = schema
    return Tool(name=name, spec={"type": "function", "function": function})


def _parse_calls(choice: Any) -> bool:
    """``disable_parallel_tool_use`` is recorded: how many calls a reply has is the policy's to say."""
    name = choice.get("type") if isinstance(choice, dict) else choice
    if name in (None, "auto"):
        return True
    if name == "none":
        return False
    raise forced_call(f"tool_choice {name!r}")


def _show_reasoning(thinking: Any) -> bool:
    """Thinking blocks are for clients that asked for them: others may not know what to do with one."""
    if thinking is None:
        return False
    if not isinstance(thinking, dict):
        raise InvalidRequest(f"thinking must be an object, not {kind(thinking)}")
    name = text(thinking, "type", "thinking.")
    if name is None:
        raise InvalidRequest("thinking.type is missing")
    return name != "disabled" and thinking.get("display") != "omitted"


def _json_schema(source: dict[str, Any]) -> str | None:
    config = source.get("output_config")
    if config is not None and not isinstance(config, dict):
        raise InvalidRequest(f"output_config must be an object, not {kind(config)}")
    where, value = "output_config.format", (config or {}).get("format")
    if value is None:
        where, value = "output_format", source.get("output_format")
    if value is None:
        return None
    if not isinstance(value, dict) or value.get("type") != "json_schema":
        raise InvalidRequest(f"{where} must be an object of type json_schema")
    schema = value.get("schema")
    if not isinstance(schema, dict):
        raise InvalidRequest(f"{where}.schema must be an object")
    return dumped(schema, f"{where}.schema")
