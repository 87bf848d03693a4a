"""Anthropic Messages, inbound: a request body as a ``ModelRequest``.

(https://docs.anthropic.com/en/api/messages and …/messages-count-tokens)

Read: system, messages, tools, tool_choice, stream, max_tokens (required), stop_sequences, thinking,
output_config.format / output_format. Recorded but not obeyed, because the trainer pins sampling: temperature,
top_p, top_k, effort. Hosted tools are recorded and not offered to the model. Refused, because obeying or
ignoring it would make the record untrue: tools without a schema, threads that the provider remembers, and blocks
that are not known. Pictures and documents become a text, or are refused (``media``).

Holds: what a message becomes depends on that message alone. Moving text between a string and a list of one
block, or moving a ``cache_control`` hint, changes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from turnstile.models import Message, Tool, ToolCall
from turnstile_server.errors import InvalidRequest
from turnstile_server.gate.dialects.base import NO_CONTEXT, BodyContext, ModelRequest, ToolOffer
from turnstile_server.gate.dialects.json import (
    dumped,
    flag,
    kind,
    objects,
    positive_int,
    recorded,
    stop_strings,
    text,
)
from turnstile_server.gate.dialects.media import Media, TextContent
from turnstile_server.gate.dialects.read_body import ReadBody, read_body
from turnstile_server.gate.dialects.tool_choice import CallChoice, forced

HISTORY = "messages"

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
"""The part of the path by which a body is only counted; such a body has no max_tokens."""

_HOSTED = ("web_search_", "web_fetch_", "code_execution_", "tool_search_tool_", "advisor_", "mcp_toolset")
"""Prefixes of the types of tools that the provider runs; a date follows."""

_ROLES = ("user", "assistant", "system")


def parse_anthropic(body: bytes, context: BodyContext = NO_CONTEXT) -> ModelRequest:
    """The request in a Messages body. Raises InvalidRequest, which names the field."""
    read = read_body(body, HISTORY, context.before)
    outline = read.outline(_outline, context.params)
    messages = read.messages(lambda item, index: _parse(item, index, context.media))
    if not messages:
        raise InvalidRequest("messages must have at least one message")
    return replace(outline, messages=(*outline.messages, *messages))


def _outline(read: ReadBody, params: Mapping[str, str]) -> ModelRequest:
    """The request with its system text for all messages."""
    source = read.source
    if source.get("thread") is not None:
        raise InvalidRequest("thread is not accepted: every call must name its whole history in messages")
    max_tokens = positive_int(source, "max_tokens")
    if max_tokens is None and COUNTING not in params:
        raise InvalidRequest("max_tokens is missing: it must be a whole number above 0")
    offer = read.tools(_tools)
    hosted = offer.hosted + _servers(source)
    asked = recorded(source, ASKED)
    choice = _call_choice(source.get("tool_choice"), offer)
    return ModelRequest(
        messages=parse_system(source.get("system")),
        tools=offer.offered(),
        model=text(source, "model") or "",
        stream=flag(source, "stream"),
        stream_usage=True,
        max_tokens=max_tokens,
        stop=stop_strings(source.get("stop_sequences"), "stop_sequences"),
        parse_calls=choice.may,
        forced_call=choice.forced,
        json_schema=_json_schema(source),
        asked={**asked, "hosted_tools": hosted} if hosted else asked,
        show_reasoning=_show_reasoning(source.get("thinking")),
    )


def _tools(source: dict[str, Any]) -> ToolOffer:
    """The tools to offer. Types of hosted tools, which the provider would run, are kept apart."""
    offer = ToolOffer()
    for index, item in enumerate(objects(source, "tools")):
        where = f"tools[{index}]"
        type_ = text(item, "type", f"{where}.") or "custom"
        if type_.startswith(_HOSTED):
            offer.hosted.append(type_)
        elif type_ != "custom":
            raise InvalidRequest(
                f"{where}: a tool of type {type_!r} has no schema that this model could read; "
                "offer it with a name, a description and an input_schema"
            )
        else:
            offer.add(_tool(item, where), where)
    return offer


def _servers(source: dict[str, Any]) -> list[str]:
    """The MCP servers, which the provider would run too."""
    servers = objects(source, "mcp_servers")
    return [f"mcp_server {text(item, 'name', f'mcp_servers[{at}].')}" for at, item in enumerate(servers)]


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


def _call_choice(choice: Any, offer: ToolOffer) -> CallChoice:
    """What the model may call.

    ``disable_parallel_tool_use`` is recorded and not obeyed: the policy chooses how many calls a reply has.
    """
    name = choice.get("type") if isinstance(choice, dict) else choice
    if name in (None, "auto"):
        return CallChoice()
    if name == "none":
        return CallChoice(may=False)
    if name == "any":
        return forced("", offer.tools, "tool_choice")
    if name == "tool":
        return forced(choice.get("name") if isinstance(choice, dict) else None, offer.tools, "tool_choice")
    raise InvalidRequest(f"tool_choice {name!r} is not accepted; send auto, any, tool or none")


def _show_reasoning(thinking: Any) -> bool:
    """True if the client asked for thinking blocks; a client that did not may be unable to read one."""
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


def parse_system(value: Any) -> tuple[Message, ...]:
    """The top-level ``system`` as one leading message; none where it is empty.

    Its blocks are sections that clients keep apart (who the model is, what to do, where it works), so a blank
    line separates them. Blocks of one message are pieces of one text, and are joined as they are.
    """
    if isinstance(value, list):
        value = "\n\n".join(part for part in _texts(value, "system") if part)
    elif value is not None and not isinstance(value, str):
        raise InvalidRequest(f"system must be a string or an array of text blocks, not {kind(value)}")
    return (Message("system", value),) if value else ()


def _parse(item: dict[str, Any], index: int, media: Media) -> tuple[Message, ...]:
    """The messages of one item of ``messages``. Raises InvalidRequest, which names the block."""
    where = f"messages[{index}]"
    match item.get("role"):
        case "user":
            return _user(item.get("content"), f"{where}.content", media)
        case "assistant":
            return (_assistant(item.get("content"), f"{where}.content"),)
        case "system":
            return (Message("system", "".join(_texts(item.get("content"), f"{where}.content"))),)
        case name:
            raise InvalidRequest(f"{where}.role must be one of {', '.join(_ROLES)}, not {name!r}")


def _user(content: Any, where: str, media: Media) -> tuple[Message, ...]:
    """The messages of a user item, in wire order.

    Each tool_result is a message, and so is each run of text between them.
    """
    messages: list[Message] = []
    run = TextContent()
    for block, place in _blocks(content, where):
        if block.get("type") != "tool_result":
            _read_block(block, place, "a message of the user", media, run)
            continue
        if run.texts:
            messages.append(Message("user", run.text, omitted=tuple(run.omitted)))
            run = TextContent()
        result = _result(block.get("content"), f"{place}.content", media)
        call_id = text(block, "tool_use_id", f"{place}.")
        messages.append(Message("tool", result.text, tool_call_id=call_id, omitted=tuple(result.omitted)))
    if run.texts or not messages:
        messages.append(Message("user", run.text, omitted=tuple(run.omitted)))
    return tuple(messages)


def _assistant(content: Any, where: str) -> Message:
    said: list[str] = []
    thought: list[str] = []
    calls: list[ToolCall] = []
    for block, place in _blocks(content, where):
        match block.get("type"):
            case "text":
                said.append(_text(block, place))
            case "thinking":
                thought.append(text(block, "thinking", f"{place}.") or "")
            case "redacted_thinking":
                pass  # another provider's ciphertext: the model could not read it
            case "tool_use":
                calls.append(_tool_use(block, place))
            case _:
                raise _refused(block, place, "a message of the assistant")
    return Message("assistant", "".join(said), reasoning="".join(thought) or None, tool_calls=tuple(calls))


def _tool_use(block: dict[str, Any], where: str) -> ToolCall:
    name = text(block, "name", f"{where}.")
    if not name:
        raise InvalidRequest(f"{where}.name is missing")
    arguments = block.get("input", {})
    if not isinstance(arguments, dict):
        raise InvalidRequest(f"{where}.input must be an object, not {kind(arguments)}")
    return ToolCall(name, dumped(arguments, f"{where}.input"), text(block, "id", f"{where}."))


def _result(content: Any, where: str, media: Media) -> TextContent:
    """The content of a tool_result. A tool_reference names a tool that a search found: its name, on a line."""
    found = TextContent()
    for block, place in _blocks(content, where):
        if block.get("type") == "tool_reference":
            found.texts.append(f"{text(block, 'tool_name', f'{place}.') or ''}\n")
        else:
            _read_block(block, place, "a tool_result", media, found)
    return found


def _read_block(block: dict[str, Any], where: str, inside: str, media: Media, content: TextContent) -> None:
    """Adds a block's text: its own, or the one in the place of a picture or a document that is no text."""
    source = block.get("source")
    match block.get("type"):
        case "text":
            content.texts.append(_text(block, where))
        case "document" if isinstance(source, dict) and source.get("type") == "text":
            content.texts.append(text(source, "data", f"{where}.source.") or "")
        case "image" | "document" as kind:
            content.omit(kind, where, media)
        case _:
            raise _refused(block, where, inside)


def _texts(content: Any, where: str) -> list[str]:
    """The texts of content that may hold text only."""
    texts: list[str] = []
    for block, place in _blocks(content, where):
        if block.get("type") != "text":
            raise _refused(block, place, "a system message")
        texts.append(_text(block, place))
    return texts


def _text(block: dict[str, Any], where: str) -> str:
    return text(block, "text", f"{where}.") or ""


def _blocks(content: Any, where: str) -> list[tuple[dict[str, Any], str]]:
    """The blocks and their places in the body; a string is one text block, null is none."""
    if content is None:
        return []
    if isinstance(content, str):
        return [({"type": "text", "text": content}, where)]
    if not isinstance(content, list):
        raise InvalidRequest(f"{where} must be a string or an array of blocks, not {kind(content)}")
    return [(block, f"{where}[{index}]") for index, block in enumerate(objects({"": content}, "", where))]


def _refused(block: dict[str, Any], where: str, inside: str) -> InvalidRequest:
    return InvalidRequest(
        f"{where}: a block of type {block.get('type')!r} is not accepted in {inside}, the model reads text only"
    )
