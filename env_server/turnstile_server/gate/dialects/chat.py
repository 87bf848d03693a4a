"""OpenAI Chat Completions: request, reply, stream, and the dialect itself.

(https://platform.openai.com/docs/api-reference/chat/create)

Read: messages, tools, tool_choice, stream, stream_options, max_tokens / max_completion_tokens, stop,
response_format. Recorded but not obeyed, because the trainer pins sampling: temperature, top_p, penalties,
seed, …. Refused, because obeying or ignoring it would make the record untrue: n > 1, logit_bias, logprobs,
hosted tools, and audio as the answer. Pictures, sound and files become a text, or are refused (``media``).

A client that renders itself may ask for token ids (``return_token_ids``), as from vLLM
(https://docs.vllm.ai/en/latest/serving/openai_compatible_server.html): the reply has ``prompt_token_ids``, and
its choice ``token_ids`` and, with ``logprobs``, one entry for each, named ``token_id:N``. Of a stream they come
with its last choice. Without it logprobs are refused.

Streams are ``chat.completion.chunk`` events as server-sent events, ended by ``[DONE]``. Reasoning travels as
``reasoning_content``, the name that SGLang, vLLM and DeepSeek use.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import orjson

from turnstile.models import Message, Role, Tool, ToolCall
from turnstile_server.errors import InvalidRequest, TurnstileError
from turnstile_server.gate.dialects.base import (
    EVENT_STREAM,
    NO_CONTEXT,
    NO_PARAMS,
    BodyContext,
    Endpoint,
    FinishedReply,
    ModelRequest,
    Purpose,
    ReplyHead,
    StreamWriter,
    ToolOffer,
    endpoint,
)
from turnstile_server.gate.dialects.json import (
    flag,
    objects,
    positive_int,
    recorded,
    stop_strings,
    text,
)
from turnstile_server.gate.dialects.media import Media
from turnstile_server.gate.dialects.openai import (
    LOGPROBS,
    call_arguments,
    call_choice,
    content_text,
    error_body,
    format_schema,
    model_body,
    models_body,
    refuse_logit_bias,
    role_of,
    server_event,
    usage_value,
)
from turnstile_server.gate.dialects.read_body import ReadBody, read_body
from turnstile_server.rendering.protocol import CallDelta, Delta, ReasoningDelta, TextDelta

HISTORY = "messages"

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
_ROLES: dict[str, Role] = {
    "system": "system",
    "developer": "developer",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
}


class ChatDialect:
    name = "chat"
    history = HISTORY
    endpoints: tuple[Endpoint, ...] = (
        endpoint("/v1/chat/completions", Purpose.TURN),
        endpoint("/v1/models", Purpose.MODELS),
        endpoint("/v1/models/{model}", Purpose.MODEL),
    )

    def parse(self, body: bytes, context: BodyContext = NO_CONTEXT) -> ModelRequest:
        return parse_chat(body, context)

    def count(self, tokens: int) -> bytes:
        raise NotImplementedError(f"{self.name} has no endpoint that counts")

    def reply(self, reply: FinishedReply, request: ModelRequest) -> bytes:
        message = reply.message
        written: dict[str, Any] = {
            "role": "assistant",
            "content": message.content if message.content or not message.tool_calls else None,
            "refusal": None,
        }
        if message.reasoning:
            written["reasoning_content"] = message.reasoning
        if message.tool_calls:
            written["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for call in message.tool_calls
            ]
        choice = {"index": 0, "message": written, "logprobs": None, "finish_reason": _finish(reply)}
        return orjson.dumps(
            {
                "id": reply.head.named("chatcmpl-"),
                "object": "chat.completion",
                "created": reply.head.created,
                "model": reply.head.model,
                "choices": [{**choice, **_tokens(reply, request)}],
                "usage": usage_value(reply.usage),
                **_prompt_ids(reply),
            },
            option=orjson.OPT_SERIALIZE_NUMPY,
        )

    def stream(self, head: ReplyHead, request: ModelRequest) -> StreamWriter:
        return ChatStream(head, request)

    def error(self, error: TurnstileError) -> bytes:
        return error_body(error)

    def models(self, name: str, context_length: int) -> bytes:
        return models_body(name, context_length)

    def model(self, name: str, context_length: int) -> bytes:
        return model_body(name, context_length)


class ChatStream:
    """Writes a stream of chunks."""

    content_type = EVENT_STREAM

    def __init__(self, head: ReplyHead, request: ModelRequest) -> None:
        self._head: dict[str, Any] = {
            "id": head.named("chatcmpl-"),
            "object": "chat.completion.chunk",
            "created": head.created,
            "model": head.model,
        }
        self._request = request

    def start(self) -> bytes:
        return self._chunk({"role": "assistant", "content": ""})

    def delta(self, delta: Delta) -> bytes:
        match delta:
            case TextDelta(text):
                return self._chunk({"content": text})
            case ReasoningDelta(text):
                return self._chunk({"reasoning_content": text})
            case CallDelta(index, call):
                opening = {
                    "index": index,
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": ""},
                }
                body = {"index": index, "function": {"arguments": call.arguments}}
                return self._chunk({"tool_calls": [opening]}) + self._chunk({"tool_calls": [body]})

    def keepalive(self) -> bytes:
        return b": keep-alive\n\n"

    def end(self, reply: FinishedReply) -> bytes:
        choice = {"index": 0, "delta": {}, "logprobs": None, "finish_reason": _finish(reply)}
        choices = [{**choice, **_tokens(reply, self._request)}]
        tail = server_event({**self._head, "choices": choices, **_prompt_ids(reply)})
        if self._request.stream_usage:
            tail += server_event({**self._head, "choices": [], "usage": usage_value(reply.usage)})
        return tail + b"data: [DONE]\n\n"

    def error(self, error: TurnstileError) -> bytes:
        """A data event that carries ``error``: SDKs raise on it, and no ``[DONE]`` follows.

        Its message begins with the status that the error would have had, because Pi decides by these words
        whether to try again.
        """
        return b"data: " + error_body(error, stated=True) + b"\n\n"

    def _chunk(self, delta: dict[str, Any]) -> bytes:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": None}
        return server_event({**self._head, "choices": [choice]})


def _prompt_ids(reply: FinishedReply) -> dict[str, Any]:
    return {} if reply.tokens is None else {"prompt_token_ids": reply.tokens.prompt_ids}


def _tokens(reply: FinishedReply, request: ModelRequest) -> dict[str, Any]:
    """The fields of a choice that tell its tokens."""
    tokens = reply.tokens
    if tokens is None:
        return {}
    if not request.wire.get("logprobs"):
        return {"token_ids": tokens.completion_ids}
    content = [
        {"token": f"token_id:{token}", "logprob": logprob, "bytes": None, "top_logprobs": []}
        for token, logprob in zip(tokens.completion_ids.tolist(), tokens.logprobs.tolist(), strict=True)
    ]
    return {"token_ids": tokens.completion_ids, "logprobs": {"content": content, "refusal": None}}


def _finish(reply: FinishedReply) -> str:
    if reply.finish == "stop" and reply.message.tool_calls:
        return "tool_calls"
    return reply.finish


def parse_chat(body: bytes, context: BodyContext = NO_CONTEXT) -> ModelRequest:
    """The request in a Chat Completions body. Raises InvalidRequest, which names the field."""
    read = read_body(body, HISTORY, context.before)
    outline = read.outline(_outline, NO_PARAMS)
    messages = read.messages(lambda item, index: (_message(item, f"messages[{index}]", context.media),))
    if not messages:
        raise InvalidRequest("messages must have at least one message")
    return replace(outline, messages=messages)


def _outline(read: ReadBody, _: Mapping[str, str]) -> ModelRequest:
    """The request without its messages."""
    source = read.source
    _refuse_unsupported(source)
    options = source.get("stream_options")
    offer = read.tools(_tools)
    choice = call_choice(source.get("tool_choice"), offer.tools)
    return ModelRequest(
        messages=(),
        tools=offer.offered(),
        model=text(source, "model") or "",
        stream=flag(source, "stream"),
        stream_usage=isinstance(options, dict) and options.get("include_usage") is True,
        show_tokens=flag(source, "return_token_ids"),
        wire={"logprobs": flag(source, "logprobs")},
        max_tokens=positive_int(source, "max_completion_tokens") or positive_int(source, "max_tokens"),
        stop=stop_strings(source.get("stop"), "stop", one_alone=True),
        parse_calls=choice.may,
        forced_call=choice.forced,
        json_schema=format_schema(source.get("response_format"), "response_format", "json_schema"),
        asked=recorded(source, ASKED),
    )


def _refuse_unsupported(source: dict[str, Any]) -> None:
    if source.get("n") not in (None, 1):
        raise InvalidRequest("n must be 1: every completion is one turn of the episode")
    refuse_logit_bias(source)
    if source.get("top_logprobs") or (source.get("logprobs") and not flag(source, "return_token_ids")):
        raise InvalidRequest(LOGPROBS)
    for key in ("functions", "function_call"):
        if source.get(key):
            raise InvalidRequest(f"{key} is the retired form of tools; send tools instead")
    if source.get("web_search_options") is not None:
        raise InvalidRequest("web_search_options asks for a hosted tool, and there is none here")
    if source.get("modalities") not in (None, ["text"]) or source.get("audio"):
        raise InvalidRequest("only text is generated; leave out audio and modalities")


def _message(source: dict[str, Any], where: str, media: Media) -> Message:
    role = role_of(source, _ROLES, where)
    read = content_text(source.get("content"), f"{where}.content", ("text",), media)
    content, omitted = read.text, tuple(read.omitted)
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
            omitted=omitted,
        )
    if role == "tool":
        call_id = text(source, "tool_call_id", f"{where}.")
        return Message(role=role, content=content, tool_call_id=call_id, omitted=omitted)
    return Message(role=role, content=content, name=text(source, "name", f"{where}."), omitted=omitted)


def _tool_call(source: dict[str, Any], where: str) -> ToolCall:
    function = source.get("function")
    if source.get("type", "function") != "function" or not isinstance(function, dict):
        raise InvalidRequest(f"{where} must be a function call")
    name = text(function, "name", f"{where}.function.")
    if not name:
        raise InvalidRequest(f"{where}.function.name is missing")
    arguments = call_arguments(function.get("arguments"), f"{where}.function.arguments")
    return ToolCall(name=name, arguments=arguments, id=text(source, "id", f"{where}."))


def _tools(source: dict[str, Any]) -> ToolOffer:
    offer = ToolOffer()
    for index, item in enumerate(objects(source, "tools")):
        where = f"tools[{index}]"
        if item.get("type") != "function" or not isinstance(item.get("function"), dict):
            raise InvalidRequest(f"{where} must be of type function; hosted and custom tools do not exist here")
        name = text(item["function"], "name", f"{where}.function.")
        if not name:
            raise InvalidRequest(f"{where}.function.name is missing")
        offer.add(Tool(name=name, spec=item), where)
    return offer
