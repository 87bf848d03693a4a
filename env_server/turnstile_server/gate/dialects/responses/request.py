"""OpenAI Responses, inbound (https://platform.openai.com/docs/api-reference/responses/create).

Read: input, instructions, tools, tool_choice, stream, max_output_tokens, text.format. Recorded but not obeyed
(the trainer pins sampling): temperature, top_p, reasoning, …. Refused, because obeying or ignoring it would
make the record untrue: state that the server would have to keep (previous_response_id, conversation,
item_reference, …), logprobs, and items that only OpenAI's own tools leave behind. Pictures, sound and files
become a text, or are refused (``media``). Everything else is about storage, caching, billing or safety of another
server, and is ignored (``docs/dialects/responses.md``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from turnstile.models import Message, Role, ToolCall
from turnstile_server.errors import InvalidRequest
from turnstile_server.gate.dialects.base import NO_CONTEXT, NO_PARAMS, BodyContext, ModelRequest, ToolOffer
from turnstile_server.gate.dialects.json import (
    dumped,
    flag,
    kind,
    objects,
    positive_int,
    recorded,
    text,
)
from turnstile_server.gate.dialects.media import Media
from turnstile_server.gate.dialects.openai import (
    LOGPROBS,
    call_arguments,
    call_choice,
    content_text,
    format_schema,
    refuse_logit_bias,
    role_of,
)
from turnstile_server.gate.dialects.read_body import ReadBody, read_body
from turnstile_server.gate.dialects.responses.items import unsealed
from turnstile_server.gate.dialects.responses.tools import custom_arguments, joined, offered
from turnstile_server.gate.dialects.tool_choice import CallChoice

HISTORY = "input"

ASKED = (
    "temperature",
    "top_p",
    "max_output_tokens",
    "max_tool_calls",
    "parallel_tool_calls",
    "tool_choice",
    "reasoning",
    "text",
    "truncation",
)
"""Fields that say how to sample: recorded as asked, and part of the retry identity. ``hosted_tools`` beside them
lists the types of hosted tools."""

ECHOED = (
    "instructions",
    "max_output_tokens",
    "max_tool_calls",
    "metadata",
    "parallel_tool_calls",
    "prompt_cache_key",
    "reasoning",
    "safety_identifier",
    "temperature",
    "text",
    "tool_choice",
    "tools",
    "top_p",
    "user",
)
"""Fields of the request that the response object repeats."""

_STATE = {
    "previous_response_id": "send the whole history in input",
    "conversation": "send the whole history in input",
    "prompt": "send the prompt's text in instructions or input",
    "background": "leave it out and wait for the response, or stream it",
}
"""Fields that need a server which stores responses, and what to send instead."""

_ROLES: dict[str, Role] = {
    "user": "user",
    "system": "system",
    "developer": "developer",
    "assistant": "assistant",
}
_LOGPROBS = "message.output_text.logprobs"
_TEXT_PARTS = ("input_text", "output_text", "text")


def parse_responses(body: bytes, context: BodyContext = NO_CONTEXT) -> ModelRequest:
    """The request in a Responses body. Raises InvalidRequest, which names the field."""
    read, media = read_body(body, HISTORY, context.before), context.media
    outline = read.outline(_outline, NO_PARAMS)
    said = read.messages(lambda item, index: _item(item, f"input[{index}]", media), lambda: _input(read.source))
    messages = (*outline.messages, *_without_open_reasoning(said))
    if not messages:
        raise InvalidRequest("input must be a string or an array with at least one item")
    return replace(outline, messages=messages)


def _outline(read: ReadBody, _: Mapping[str, str]) -> ModelRequest:
    """The request with its instructions for all messages."""
    source = read.source
    _refuse_unsupported(source)
    instructions = text(source, "instructions")
    offer = read.tools(offered)
    asked = recorded(source, ASKED)
    if offer.hosted:
        asked["hosted_tools"] = sorted(offer.hosted)
    choice = _call_choice(source.get("tool_choice"), offer)
    return ModelRequest(
        messages=(Message("system", instructions),) if instructions else (),
        tools=offer.offered(),
        model=text(source, "model") or "",
        stream=flag(source, "stream"),
        stream_usage=True,
        max_tokens=positive_int(source, "max_output_tokens"),
        parse_calls=choice.may,
        forced_call=choice.forced,
        json_schema=_json_schema(source.get("text")),
        asked=asked,
        wire_tools=offer.wire_tools,
        wire={key: dumped(source[key], key).encode() for key in ECHOED if source.get(key) is not None},
    )


def _refuse_unsupported(source: dict[str, Any]) -> None:
    for key, instead in _STATE.items():
        if source.get(key):
            raise InvalidRequest(f"{key} is not accepted, because no response is kept here: {instead}")
    included = source.get("include")
    if source.get("top_logprobs") or (isinstance(included, list) and _LOGPROBS in included):
        raise InvalidRequest(LOGPROBS)
    refuse_logit_bias(source)


def _input(source: dict[str, Any]) -> list[dict[str, Any]]:
    value = source.get("input")
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    if value is not None and not isinstance(value, list):
        raise InvalidRequest(f"input must be a string or an array of items, not {kind(value)}")
    return objects(source, "input")


def _without_open_reasoning(messages: tuple[Message, ...]) -> tuple[Message, ...]:
    """The messages without reasoning at the very end.

    Codex keeps such reasoning of a reply whose stream was cut, and asks for the whole reply again. OpenAI accepts
    no reasoning item without the item that follows it.
    """
    end = len(messages)
    while end and messages[end - 1].reasoning and messages[end - 1].role == "assistant":
        end -= 1
    return messages[:end]


def _item(item: dict[str, Any], where: str, media: Media) -> tuple[Message, ...]:
    """The messages of one item. Only this item may be looked at, because the result is kept for later calls."""
    match item.get("type") or ("message" if "role" in item else "item_reference"):
        case "message":
            return (_message(item, where, media),)
        case "function_call" | "custom_tool_call":
            return (Message("assistant", tool_calls=(_call(item, where),)),)
        case "function_call_output" | "custom_tool_call_output":
            output = content_text(item.get("output"), f"{where}.output", _TEXT_PARTS, media)
            call_id = text(item, "call_id", f"{where}.")
            return (Message("tool", output.text, tool_call_id=call_id, omitted=tuple(output.omitted)),)
        case "reasoning":
            reasoning = _reasoning(item, where)
            return (Message("assistant", reasoning=reasoning),) if reasoning else ()
        case "item_reference":
            raise InvalidRequest(f"{where}: nothing is kept that an item could refer to; send the item itself")
        case other:
            raise InvalidRequest(
                f"{where}: an item of type {other!r} is not accepted, the model here has only the tools"
                " that the agent runs (function and custom)"
            )


def _message(item: dict[str, Any], where: str, media: Media) -> Message:
    content = content_text(item.get("content"), f"{where}.content", _TEXT_PARTS, media)
    return Message(role_of(item, _ROLES, where), content.text, omitted=tuple(content.omitted))


def _call(item: dict[str, Any], where: str) -> ToolCall:
    name = text(item, "name", f"{where}.")
    if not name:
        raise InvalidRequest(f"{where}.name is missing")
    if item["type"] == "custom_tool_call":
        arguments = custom_arguments(text(item, "input", f"{where}.") or "")
    else:
        arguments = call_arguments(item.get("arguments"), f"{where}.arguments")
    namespace = text(item, "namespace", f"{where}.")
    return ToolCall(joined(namespace, name), arguments, text(item, "call_id", f"{where}."))


def _reasoning(item: dict[str, Any], where: str) -> str:
    """The reasoning of an item: what this dialect sealed in it, else its text, else its summary.

    What another server encrypted is lost.
    """
    own = unsealed(text(item, "encrypted_content", f"{where}.") or "")
    if own is not None:
        return own
    return _texts(item, "content", "reasoning_text", where) or _texts(item, "summary", "summary_text", where)


def _texts(item: dict[str, Any], key: str, wanted: str, where: str) -> str:
    found = []
    for index, part in enumerate(objects(item, key, f"{where}.")):
        at = f"{where}.{key}[{index}]"
        if part.get("type", wanted) not in (wanted, "text"):
            raise InvalidRequest(f"{at} must be of type {wanted}, not {part.get('type')!r}")
        found.append(text(part, "text", f"{at}.") or "")
    return "".join(found)


def _call_choice(choice: Any, offer: ToolOffer) -> CallChoice:
    if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
        raise InvalidRequest(
            "tool_choice allowed_tools is not accepted: the policy may call whatever it is offered; send in tools"
            " only what it may call"
        )
    return call_choice(choice, offer.tools)


def _json_schema(value: Any) -> str | None:
    return format_schema(value.get("format") if isinstance(value, dict) else value, "text.format")
