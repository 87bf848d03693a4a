"""Gemini generateContent, inbound (https://ai.google.dev/api/generate-content).

Read: contents, systemInstruction, tools, toolConfig, generationConfig. Recorded but not obeyed (the trainer
pins sampling): temperature, topP, topK, seed, …. Refused, because obeying or ignoring it would make the record
untrue: candidateCount > 1, log probabilities, cached content, code that the provider ran. Ignored: what does not
reach the model (safetySettings, labels, thought signatures). Pictures and files become a text, or are refused
(``media``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from turnstile.models import Message, ToolCall
from turnstile_server.errors import InvalidRequest
from turnstile_server.gate.dialects.base import BodyContext, ModelRequest
from turnstile_server.gate.dialects.gemini.schema import call_choice, camel, item, items, json_schema, read_tools
from turnstile_server.gate.dialects.json import (
    dumped,
    kind,
    positive_int,
    read_object,
    recorded,
    stop_strings,
    text,
)
from turnstile_server.gate.dialects.media import Media, TextContent, media_kind
from turnstile_server.gate.dialects.parse_cache import ParseCache
from turnstile_server.gate.dialects.read_body import ReadBody, read_body

HISTORY = "contents"

ASKED = (
    "temperature",
    "topP",
    "topK",
    "seed",
    "presencePenalty",
    "frequencyPenalty",
    "maxOutputTokens",
    "stopSequences",
    "responseMimeType",
    "responseSchema",
    "responseJsonSchema",
    "thinkingConfig",
)
"""Fields of generationConfig that say how to sample: recorded as asked, and part of the retry identity."""

_DATA = ("text", "functionCall", "functionResponse")
_MEDIA = ("inlineData", "fileData")
_OTHER_DATA = ("executableCode", "codeExecutionResult")
_ABOUT_A_PART = ("thought", "thoughtSignature", "videoMetadata", "partMetadata", "mediaResolution", "callIndex")
_WRAPPERS = ("output", "result", "content", "error")
"""Keys in which clients wrap a tool's text, because the wire takes an object only."""


def parse_gemini(body: bytes, context: BodyContext) -> ModelRequest:
    """The request in a body. ``context.params``: ``model`` and ``method`` of the path, ``alt`` of the query.

    Raises InvalidRequest, which names the field.
    """
    try:
        return _call(_read(body, context.before, context.params), context.params, context.media)
    except RecursionError:
        raise InvalidRequest("the body is nested too deeply") from None


def _read(body: bytes, before: ParseCache | None, params: Mapping[str, str]) -> ReadBody:
    if params.get("method") != "countTokens":
        return read_body(body, HISTORY, before)
    source = camel(read_object(body))
    if source.get("generateContentRequest") is not None:
        source = item(source, "generateContentRequest")
    return ReadBody(HISTORY, None, None, source)


def _call(read: ReadBody, params: Mapping[str, str], media: Media) -> ModelRequest:
    outline = read.outline(_outline, params)
    contents = read.messages(
        lambda source, index: _content(source, index, media), lambda: items(read.source, HISTORY)
    )
    messages = _answers_named(contents)
    if not messages:
        raise InvalidRequest("contents must have at least one content")
    return replace(outline, messages=(*outline.messages, *messages))


def _outline(read: ReadBody, params: Mapping[str, str]) -> ModelRequest:
    """The request with its system instruction for all messages."""
    source = camel(read.source)
    if source.get("cachedContent"):
        raise InvalidRequest("cachedContent names a context that is not stored here; send its contents instead")
    config = item(source, "generationConfig")
    _refuse_unsupported(config)
    offer = read.tools(read_tools)
    asked = {**recorded(config, ASKED, "generationConfig."), **recorded(source, ["toolConfig"])}
    if offer.hosted:
        asked["hosted_tools"] = offer.hosted
    choice = call_choice(source, offer.tools)
    return ModelRequest(
        messages=_system(source.get("systemInstruction")),
        tools=offer.offered(),
        model=params.get("model", ""),
        stream=params.get("method") == "streamGenerateContent",
        stream_usage=True,
        max_tokens=positive_int(config, "maxOutputTokens"),
        stop=stop_strings(config.get("stopSequences"), "generationConfig.stopSequences", one_alone=True),
        parse_calls=choice.may,
        forced_call=choice.forced,
        json_schema=_response_schema(config),
        asked=asked,
        show_reasoning=item(config, "thinkingConfig", "generationConfig.").get("includeThoughts") is True,
        wire={"sse": "sse" in (params.get("alt"), params.get("$alt"))},
    )


def _refuse_unsupported(config: dict[str, Any]) -> None:
    if config.get("candidateCount") not in (None, 1):
        raise InvalidRequest(
            "generationConfig.candidateCount must be 1: every candidate is one turn of the episode"
        )
    for key in ("responseLogprobs", "logprobs"):
        if config.get(key):
            raise InvalidRequest(f"generationConfig.{key}: log probabilities go to the trainer; leave it out")
    modalities = config.get("responseModalities") or ["TEXT"]
    if not isinstance(modalities, list) or any(one not in ("TEXT", "MODALITY_UNSPECIFIED") for one in modalities):
        raise InvalidRequest("generationConfig.responseModalities: only TEXT is generated")
    for key in ("speechConfig", "imageConfig"):
        if config.get(key):
            raise InvalidRequest(f"generationConfig.{key}: only text is generated")


def _system(instruction: Any) -> tuple[Message, ...]:
    """One leading system message; none for an instruction without text."""
    if isinstance(instruction, dict):
        parts = _Parts(camel(instruction), "systemInstruction")
        parts.refuse("functionCall", "functionResponse", *_MEDIA)
        instruction = "".join(text(part, "text", f"{where}.") or "" for part, where in parts)
    elif instruction is not None and not isinstance(instruction, str):
        raise InvalidRequest(f"systemInstruction must be an object, not {kind(instruction)}")
    return (Message("system", instruction),) if instruction else ()


def _content(source: dict[str, Any], index: int, media: Media) -> tuple[Message, ...]:
    where = f"contents[{index}]"
    content = camel(source)
    role = content.get("role")
    parts = _Parts(content, where)
    if role == "model":
        parts.refuse("functionResponse", *_MEDIA)
        return (_reply(parts),)
    if role in (None, "", "user", "function"):
        parts.refuse("functionCall")
        return tuple(_inputs(parts, media))
    raise InvalidRequest(f"{where}.role must be user, model or function, not {role!r}")


class _Parts:
    """The parts of one content, each with its path.

    Raises InvalidRequest for a part that is no text, call, result, picture or file.
    """

    def __init__(self, content: dict[str, Any], where: str) -> None:
        self._found = [
            (camel(part), f"{where}.parts[{index}]")
            for index, part in enumerate(items(content, "parts", f"{where}."))
        ]
        for part, path in self._found:
            there = {key for key, value in part.items() if value is not None}
            # An unknown field is the part's data where the part has no other data, else a remark about it.
            data = [key for key in part if key in there.difference(_DATA, _MEDIA, _ABOUT_A_PART)]
            refused = data if there.isdisjoint((*_DATA, *_MEDIA)) else [key for key in data if key in _OTHER_DATA]
            if refused:
                raise InvalidRequest(f"{path}.{refused[0]} is not accepted, the model reads text only")

    def __iter__(self) -> Iterator[tuple[dict[str, Any], str]]:
        return iter(self._found)

    def refuse(self, *keys: str) -> None:
        for part, path in self._found:
            for key in keys:
                if part.get(key) is not None:
                    raise InvalidRequest(f"{path}.{key} has no place in a content of this role")


def _reply(parts: _Parts) -> Message:
    """The message of a model's content: thoughts and texts each joined, calls in order."""
    said: list[str] = []
    thought: list[str] = []
    calls: list[ToolCall] = []
    for part, where in parts:
        (thought if part.get("thought") else said).append(text(part, "text", f"{where}.") or "")
        if part.get("functionCall") is not None:
            calls.append(_tool_call(item(part, "functionCall", f"{where}."), f"{where}.functionCall"))
    return Message("assistant", "".join(said), reasoning="".join(thought) or None, tool_calls=tuple(calls))


def _tool_call(source: dict[str, Any], where: str) -> ToolCall:
    name = text(source, "name", f"{where}.")
    if not name:
        raise InvalidRequest(f"{where}.name is missing")
    arguments = source.get("args")
    if arguments is not None and not isinstance(arguments, dict):
        raise InvalidRequest(f"{where}.args must be an object, not {kind(arguments)}")
    return ToolCall(
        name=name,
        arguments=dumped(arguments or {}, f"{where}.args"),
        id=text(source, "id", f"{where}.") or None,
    )


def _inputs(parts: _Parts, media: Media) -> Iterator[Message]:
    """The messages of a user's content, in wire order.

    Each result is a message, and so is each run of text between them.
    """
    said = TextContent()
    answered = False
    for part, where in parts:
        said.texts.append(text(part, "text", f"{where}.") or "")
        _omit_media(part, where, media, said)
        if part.get("functionResponse") is None:
            continue
        if any(said.texts):
            yield Message("user", said.text, omitted=tuple(said.omitted))
        said, answered = TextContent(), True
        yield _result(item(part, "functionResponse", f"{where}."), f"{where}.functionResponse", media)
    if any(said.texts) or not answered:
        yield Message("user", said.text, omitted=tuple(said.omitted))


def _omit_media(part: dict[str, Any], where: str, media: Media, content: TextContent) -> None:
    """Puts a text in the place of the part's picture or file, if it has one."""
    for key in _MEDIA:
        if part.get(key) is not None:
            kind = media_kind(item(part, key, f"{where}.").get("mimeType"))
            content.omit(kind, f"{where}.{key}", media)


def _result(source: dict[str, Any], where: str, media: Media) -> Message:
    """A tool's result. Its pictures and files stand behind its text."""
    shown = TextContent()
    for index, part in enumerate(items(source, "parts", f"{where}.")):
        at, read = f"{where}.parts[{index}]", camel(part)
        if not any(read.get(key) is not None for key in _MEDIA):
            raise InvalidRequest(f"{at} must have inlineData or fileData")
        _omit_media(read, at, media, shown)
    name = text(source, "name", f"{where}.")
    response = source.get("response")
    if response is not None and not isinstance(response, dict):
        raise InvalidRequest(f"{where}.response must be an object, not {kind(response)}")
    output = _output(response or {}, where)
    call_id = text(source, "id", f"{where}.") or None
    # A result without an id is told by its name (``_answers_named``), and has no name then.
    return Message(
        "tool",
        output + shown.text,
        tool_call_id=call_id,
        name=None if call_id else name,
        omitted=tuple(shown.omitted),
    )


def _output(response: Mapping[str, Any], where: str) -> str:
    """A tool's output as the other dialects carry it.

    It is the only text in its wrapper, empty for an empty object, else the whole object as JSON.
    """
    if len(response) == 1:
        ((key, value),) = response.items()
        if key in _WRAPPERS and isinstance(value, str):
            return value
    return dumped(response, f"{where}.response") if response else ""


def _answers_named(messages: Sequence[Message]) -> tuple[Message, ...]:
    """``messages`` where a result without a call id gets the id of the first open call of its name."""
    if all(message.role != "tool" or message.tool_call_id for message in messages):
        return tuple(messages)
    named: list[Message] = []
    waiting: list[ToolCall] = []
    for message in messages:
        found = message
        if message.role == "assistant":
            if named and named[-1].role != "assistant":
                waiting = []
            waiting += message.tool_calls
        elif message.role == "tool":
            name, call_id = message.name, message.tool_call_id
            same = (call for call in waiting if (call.id == call_id if call_id else call.name == name))
            call = next(same, None)
            if call is not None:
                waiting.remove(call)
            if not call_id:
                found = replace(message, tool_call_id=None if call is None else call.id, name=None)
        named.append(found)
    return tuple(named)


def _response_schema(config: dict[str, Any]) -> str | None:
    mime = text(config, "responseMimeType", "generationConfig.") or "text/plain"
    as_json, as_openapi = config.get("responseJsonSchema"), config.get("responseSchema")
    schema = as_json if as_json is not None else json_schema(as_openapi)
    if schema is not None and not isinstance(schema, dict):
        raise InvalidRequest(f"generationConfig.responseSchema must be an object, not {kind(schema)}")
    if mime == "text/plain":
        if schema:
            raise InvalidRequest("generationConfig.responseSchema needs responseMimeType application/json")
        return None
    if mime != "application/json":
        raise InvalidRequest(f"generationConfig.responseMimeType {mime!r} is not known; use application/json")
    return dumped(schema or {"type": "object"}, "generationConfig.responseSchema")
