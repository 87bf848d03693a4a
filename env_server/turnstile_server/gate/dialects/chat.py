"""OpenAI Chat Completions, outbound, and the dialect as a whole.

Streams are ``chat.completion.chunk`` events as server-sent events, ended by ``[DONE]``
(https://platform.openai.com/docs/api-reference/chat/streaming). Reasoning travels as ``reasoning_content``, the
name SGLang, vLLM and DeepSeek use.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson

from turnstile_server.errors import TurnstileError
from turnstile_server.gate.dialects.base import (
    EVENT_STREAM,
    NO_PARAMS,
    CallEvent,
    Event,
    Head,
    ModelCall,
    Purpose,
    ReasoningEvent,
    Reply,
    StreamWriter,
    TextEvent,
    Usage,
    endpoint,
)
from turnstile_server.gate.dialects.chat_request import parse_chat
from turnstile_server.gate.dialects.openai_shared import error_body, model_body, models_body
from turnstile_server.gate.dialects.parse_cache import ParseCache


class ChatDialect:
    name = "chat"
    endpoints = (
        endpoint("/v1/chat/completions", Purpose.TURN),
        endpoint("/v1/models", Purpose.MODELS),
        endpoint("/v1/models/{model}", Purpose.MODEL),
    )

    def parse(
        self, body: bytes, before: ParseCache | None = None, params: Mapping[str, str] = NO_PARAMS
    ) -> ModelCall:
        return parse_chat(body, before)

    def count(self, tokens: int) -> bytes:
        raise NotImplementedError("Chat Completions has no endpoint that counts")

    def reply(self, reply: Reply, call: ModelCall) -> bytes:
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
        return orjson.dumps(
            {
                "id": reply.head.named("chatcmpl-"),
                "object": "chat.completion",
                "created": reply.head.created,
                "model": reply.head.model,
                "choices": [{"index": 0, "message": written, "logprobs": None, "finish_reason": _finish(reply)}],
                "usage": _usage(reply.usage),
            }
        )

    def stream(self, head: Head, call: ModelCall) -> StreamWriter:
        return _ChatStream(head, call.stream_usage)

    def error(self, error: TurnstileError) -> bytes:
        return error_body(error)

    def models(self, name: str, context_length: int) -> bytes:
        return models_body(name, context_length)

    def model(self, name: str, context_length: int) -> bytes:
        return model_body(name, context_length)


class _ChatStream:
    content_type = EVENT_STREAM

    def __init__(self, head: Head, usage: bool) -> None:
        self._head: dict[str, Any] = {
            "id": head.named("chatcmpl-"),
            "object": "chat.completion.chunk",
            "created": head.created,
            "model": head.model,
        }
        self._usage = usage

    def start(self) -> bytes:
        return self._chunk({"role": "assistant", "content": ""})

    def event(self, event: Event) -> bytes:
        match event:
            case TextEvent(text):
                return self._chunk({"content": text})
            case ReasoningEvent(text):
                return self._chunk({"reasoning_content": text})
            case CallEvent(index, call):
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

    def end(self, reply: Reply) -> bytes:
        tail = self._chunk({}, _finish(reply))
        if self._usage:
            tail += _sse({**self._head, "choices": [], "usage": _usage(reply.usage)})
        return tail + b"data: [DONE]\n\n"

    def error(self, error: TurnstileError) -> bytes:
        """SDKs raise on a data event that carries ``error``; there is no ``[DONE]`` after it. The status that it
        would have had stands in front of the message: Pi asks again by such words."""
        return b"data: " + error_body(error, stated=True) + b"\n\n"

    def _chunk(self, delta: dict[str, Any], finish: str | None = None) -> bytes:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}
        return _sse({**self._head, "choices": [choice]})


def _sse(value: dict[str, Any]) -> bytes:
    return b"data: " + orjson.dumps(value) + b"\n\n"


def _finish(reply: Reply) -> str:
    if reply.finish == "stop" and reply.message.tool_calls:
        return "tool_calls"
    return reply.finish


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }
