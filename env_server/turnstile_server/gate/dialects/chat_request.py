"""OpenAI Chat Completions, inbound (https://platform.openai.com/docs/api-reference/chat/create).

Read: messages, tools, tool_choice, stream, stream_options, max_tokens / max_completion_tokens, stop,
response_format. Recorded but not obeyed (the trainer pins sampling): temperature, top_p, penalties, seed, ….
Refused, because obeying or ignoring it would make the record untrue: n > 1, logit_bias, logprobs, forced tools,
hosted tools, images and audio.
"""

from __future__ import annotations

from typing import Any

from turnstile.models import Message, Role, Tool, ToolCall
from turnstile_server.errors import InvalidRequest
from turnstile_server.gate.dialects.json_body import (
    dumped,
    flag,
    kind,
    objects,
    positive_int,
    read_object,
    recorded,
    text,
)
from turnstile_server.gate.dialects.parsed_before import ParsedBefore
from turnstile_server.gate.dialects.protocol import ModelCall

ASKED = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
    "seed",
    "max_tokens",
    "max_completion_tokens",
    "stop",
    "response_format",
    "tool_choice",
    "parallel_tool_calls",
    "reasoning_effort",
    "verbosity",
    "chat_template_kwargs",
)
"""Fields that say how to sample: recorded as asked, and part of the retry identity."""

MAX_STOP_STRINGS = 16

_ROLES: dict[str, Role] = {
    "system": "system",
    "developer": "developer",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
}


def parse_chat(body: bytes, before: ParsedBefore | None = None) -> ModelCall:
    """The call in a Chat Completions body. Raises InvalidRequest, naming the field."""
    source = read_object(body)
    _refuse_unsupported(source)
    messages = (before or ParsedBefore()).parse(
        objects(source, "messages"), lambda item, index: (_message(item, f"messages[{index}]"),), _exact
    )
    if not messages:
        raise InvalidRequest("messages must have at least one message")
    options = source.get("stream_options")
    return ModelCall(
        messages=messages,
        tools=_tools(source),
        model=text(source, "model") or "",
        stream=flag(source, "stream"),
        stream_usage=isinstance(options, dict) and options.get("include_usage") is True,
        max_tokens=positive_int(source, "max_completion_tokens") or positive_int(source, "max_tokens"),
        stop=_stop(source.get("stop")),
        parse_calls=_parse_calls(source.get("tool_choice")),
        json_schema=_json_schema(source.get("response_format")),
        asked=recorded(source, ASKED),
    )


def _refuse_unsupported(source: dict[str, Any]) -> None:
    if source.get("n") not in (None, 1):
        raise InvalidRequest("n must be 1: every completion is one turn of the episode")
    if source.get("logit_bias"):
        raise InvalidRequest("logit_bias is not accepted: recorded logprobs must be those of the policy")
    if source.get("logprobs") or source.get("top_logprobs"):
        raise InvalidRequest("logprobs go to the trainer, through the control door; leave them out")
    for key in ("functions", "function_call"):
        if source.get(key):
            raise InvalidRequest(f"{key} is the retired form of tools; send tools instead")
    if source.get("web_search_options"):
        raise InvalidRequest("web_search_options asks for a hosted tool, and there is none here")
    if source.get("modalities") not in (None, ["text"]) or source.get("audio"):
        raise InvalidRequest("only text is generated; leave out audio and modalities")


def _message(source: dict[str, Any], where: str) -> Message:
    name = source.get("role")
    role = _ROLES.get(name) if isinstance(name, str) else None
    if role is None:
        raise InvalidRequest(f"{where}.role must be one of {', '.join(_ROLES)}, not {name!r}")
    content = _content(source.get("content"), f"{where}.content")
    if role == "assistant":
        if source.get("function_call"):
            raise InvalidRequest(f"{where}.function_call is the retired form of tool_calls; send tool_calls")
        return Message(
            role=role,
            content=content,
            reasoning=text(source, "reasoning_content", f"{where}.") or text(source, "reasoning", f"{where}."),
            tool_calls=tuple(
                _tool_call(item, f"{where}.tool_calls[{index}]")
                for index, item in enumerate(objects(source, "tool_calls", f"{where}."))
            ),
        )
    if role == "tool":
        return Message(role=role, content=content, tool_call_id=text(source, "tool_call_id", f"{where}."))
    return Message(role=role, content=content, name=text(source, "name", f"{where}."))


def _exact(item: dict[str, Any]) -> bool:
    """Arguments may come as an object; nothing else of a message is a number."""
    calls = (item.get("tool_calls") or ()) if item["role"] == "assistant" else ()
    return all(isinstance(call.get("function", {}).get("arguments", ""), str) for call in calls)


def _content(value: Any, where: str) -> str:
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise InvalidRequest(f"{where} must be a string or an array of parts, not {kind(value)}")
    return "".join(_part(part, f"{where}[{index}]") for index, part in enumerate(value))


def _part(part: Any, where: str) -> str:
    if isinstance(part, str):
        return part
    if not isinstance(part, dict):
        raise InvalidRequest(f"{where} must be an object, not {kind(part)}")
    if part.get("type") == "text":
        return text(part, "text", f"{where}.") or ""
    if part.get("type") == "refusal":
        return text(part, "refusal", f"{where}.") or ""
    raise InvalidRequest(
        f"{where}: a part of type {part.get('type')!r} is not accepted, the model reads text only"
    )


def _tool_call(source: dict[str, Any], where: str) -> ToolCall:
    function = source.get("function")
    if source.get("type", "function") != "function" or not isinstance(function, dict):
        raise InvalidRequest(f"{where} must be a function call")
    name = text(function, "name", f"{where}.function.")
    if not name:
        raise InvalidRequest(f"{where}.function.name is missing")
    arguments = function.get("arguments")
    if not isinstance(arguments, str):  # some clients send the object itself
        arguments = "{}" if arguments is None else dumped(arguments, f"{where}.function.arguments")
    return ToolCall(name=name, arguments=arguments, id=text(source, "id", f"{where}."))


def _tools(source: dict[str, Any]) -> tuple[Tool, ...]:
    tools: dict[str, Tool] = {}
    for index, item in enumerate(objects(source, "tools")):
        where = f"tools[{index}]"
        if item.get("type") != "function" or not isinstance(item.get("function"), dict):
            raise InvalidRequest(f"{where} must be of type function; hosted and custom tools do not exist here")
        name = text(item["function"], "name", f"{where}.function.")
        if not name:
            raise InvalidRequest(f"{where}.function.name is missing")
        if name in tools:
            raise InvalidRequest(f"{where}: a tool named {name!r} is offered twice")
        tools[name] = Tool(name=name, spec=item)
    return tuple(tools.values())


def _stop(value: Any) -> tuple[str, ...]:
    if value is None:
        return ()
    items = [value] if isinstance(value, str) else value
    if not isinstance(items, list) or not all(isinstance(item, str) and item for item in items):
        raise InvalidRequest("stop must be a non-empty string or an array of them")
    if len(items) > MAX_STOP_STRINGS:
        raise InvalidRequest(f"stop has {len(items)} strings; at most {MAX_STOP_STRINGS} are accepted")
    return tuple(items)


def _parse_calls(choice: Any) -> bool:
    if choice in (None, "auto"):
        return True
    if choice == "none":
        return False
    raise InvalidRequest(
        f"tool_choice {choice!r} is not accepted: forcing a call would change what the policy samples; use auto"
    )


def _json_schema(value: Any) -> str | None:
    if value is None:
        return None
    if not isinstance(value, dict):
        raise InvalidRequest(f"response_format must be an object, not {kind(value)}")
    match value.get("type"):
        case "text":
            return None
        case "json_object":
            return '{"type":"object"}'
        case "json_schema":
            inner = value.get("json_schema")
            schema = inner.get("schema") if isinstance(inner, dict) else None
            if not isinstance(schema, dict):
                raise InvalidRequest("response_format.json_schema.schema must be an object")
            return dumped(schema, "response_format.json_schema.schema")
    raise InvalidRequest(f"response_format.type {value.get('type')!r} is not known")
