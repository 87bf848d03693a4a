"""Anthropic Messages, outbound: replies, streams, errors, and the dialect itself.

A stream is server-sent events (https://docs.anthropic.com/en/docs/build-with-claude/streaming):

    message_start ping ( content_block_start content_block_delta+ content_block_stop | ping )*
    message_delta message_stop | error

Holds: at most one block is open; a block is of one kind; a thinking block ends with its signature.
"""

from __future__ import annotations

import base64
import re
from typing import Any, Literal

import orjson

from turnstile.models import Message, ToolCall
from turnstile_server.errors import ContextOverflow, TurnstileError
from turnstile_server.gate.dialects.anthropic.request import COUNTING, HISTORY, parse_anthropic
from turnstile_server.gate.dialects.base import (
    EVENT_STREAM,
    NO_CONTEXT,
    BodyContext,
    Endpoint,
    FinishedReply,
    ModelRequest,
    Purpose,
    ReplyHead,
    StreamWriter,
    Usage,
    endpoint,
)
from turnstile_server.gate.dialects.json import strict_arguments
from turnstile_server.rendering.protocol import CallDelta, Delta, ReasoningDelta, TextDelta

_VERSION = "anthropic-version"
"""A header that every request of this API has; OpenAI's models are listed at the same paths."""

_COUNT = Endpoint(
    pattern=re.compile(rf"/v1/messages/(?P<{COUNTING}>count_tokens)"),
    purpose=Purpose.COUNT,
    methods=("POST",),
    shown="/v1/messages/count_tokens",
)

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
_PING = b'event: ping\ndata: {"type":"ping"}\n\n'
_Kind = Literal["text", "thinking"]
_EMPTY: dict[_Kind, dict[str, Any]] = {
    "text": {"type": "text", "text": ""},
    "thinking": {"type": "thinking", "thinking": "", "signature": ""},
}


class AnthropicDialect:
    name = "anthropic"
    history = HISTORY
    endpoints = (
        endpoint("/v1/messages", Purpose.TURN),
        _COUNT,
        endpoint("/v1/models", Purpose.MODELS, header=_VERSION),
        endpoint("/v1/models/{model}", Purpose.MODEL, header=_VERSION),
        endpoint("/api/hello", Purpose.PROBE),
        endpoint("/", Purpose.PROBE),
    )

    def parse(self, body: bytes, context: BodyContext = NO_CONTEXT) -> ModelRequest:
        return parse_anthropic(body, context)

    def count(self, tokens: int) -> bytes:
        return orjson.dumps({"input_tokens": tokens})

    def reply(self, reply: FinishedReply, request: ModelRequest) -> bytes:
        content = content_value(reply.message, reply.head, request.show_reasoning)
        return orjson.dumps({**message_value(reply.head, content, reply.usage), **stop(reply)})

    def stream(self, head: ReplyHead, request: ModelRequest) -> StreamWriter:
        return AnthropicStream(head, request.show_reasoning)

    def error(self, error: TurnstileError) -> bytes:
        return orjson.dumps(error_value(error))

    def models(self, name: str, context_length: int) -> bytes:
        listed = {"data": [_model(name, context_length)], "first_id": name, "last_id": name, "has_more": False}
        return orjson.dumps(listed)

    def model(self, name: str, context_length: int) -> bytes:
        return orjson.dumps(_model(name, context_length))


def _model(name: str, context_length: int) -> dict[str, Any]:
    return {
        "type": "model",
        "id": name,
        "display_name": name,
        "created_at": "1970-01-01T00:00:00Z",
        "lifecycle": "active",
        "max_input_tokens": context_length - 1,
        "max_tokens": context_length - 1,
    }


def message_value(head: ReplyHead, content: list[dict[str, Any]], usage: Usage) -> dict[str, Any]:
    """A message object before its end: no stop reason yet."""
    return {
        "id": head.named("msg_"),
        "type": "message",
        "role": "assistant",
        "model": head.model,
        "content": content,
        "stop_reason": None,
        "stop_sequence": None,
        "usage": usage_value(usage),
    }


def content_value(message: Message, head: ReplyHead, show_reasoning: bool) -> list[dict[str, Any]]:
    """The content blocks of a whole reply.

    An empty reply is one empty text block: some clients take a reply without blocks for a broken one, others read
    ``content[0].text`` of every reply.
    """
    blocks: list[dict[str, Any]] = []
    if message.reasoning and show_reasoning:
        blocks.append({"type": "thinking", "thinking": message.reasoning, "signature": signature(head)})
    if message.content:
        blocks.append({"type": "text", "text": message.content})
    for call in message.tool_calls:
        written = orjson.Fragment(strict_arguments(call.arguments))
        blocks.append({"type": "tool_use", "id": call.id, "name": call.name, "input": written})
    return blocks or [{"type": "text", "text": ""}]


def signature(head: ReplyHead) -> str:
    """The signature of a thinking block. It is never checked: a reply is recognised by its content."""
    return base64.b64encode(head.named("turnstile ").encode()).decode()


def stop(reply: FinishedReply) -> dict[str, Any]:
    """The reason that the reply stopped, as fields of the message.

    A reply that was cut off says so even if it has calls, because calls may be missing.
    """
    if reply.finish == "length":
        return {"stop_reason": "max_tokens", "stop_sequence": None}
    if reply.message.tool_calls:
        return {"stop_reason": "tool_use", "stop_sequence": None}
    if reply.stop_string is not None:
        return {"stop_reason": "stop_sequence", "stop_sequence": reply.stop_string}
    return {"stop_reason": "end_turn", "stop_sequence": None}


def usage_value(usage: Usage) -> dict[str, Any]:
    """Usage. ``input_tokens`` are the computed ones: with those read from the cache they make the prompt."""
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
    }


def error_value(error: TurnstileError, *, in_stream: bool = False) -> dict[str, Any]:
    """An error object.

    ``details.error_code`` is the stable type of ``errors.py``, ``type`` the nearest of Anthropic's. In a stream
    the HTTP status was already 200, so the type alone tells clients whether to try again: they do for
    ``overloaded_error``.
    """
    fallback = "api_error" if error.status >= 500 else "invalid_request_error"
    name = "overloaded_error" if in_stream and error.retryable else _TYPES.get(error.status, fallback)
    details: dict[str, Any] = {"error_code": error.type}
    if error.detail is not None:
        details["detail"] = error.detail
    return {
        "type": "error",
        "error": {"type": name, "message": _message(error), "details": details},
        "request_id": None,
    }


def _message(error: TurnstileError) -> str:
    """The message. Clients that compact a full context recognise the API's own words, and nothing else."""
    match error:
        case ContextOverflow(detail={"prompt_tokens": int(prompt), "context_length": int(context)}):
            return f"prompt is too long: {prompt} tokens > {context - 1} maximum"
        case ContextOverflow():
            return f"prompt is too long: {error.message}"
        case _:
            return error.message


class AnthropicStream:
    """Writes a stream of events. ``show_reasoning``: reasoning becomes thinking blocks; else it is left out."""

    content_type = EVENT_STREAM

    def __init__(self, head: ReplyHead, show_reasoning: bool) -> None:
        self._head = head
        self._show_reasoning = show_reasoning
        self._index = 0
        self._open: _Kind | None = None

    def start(self) -> bytes:
        usage = Usage(prompt_tokens=self._head.prompt_tokens, completion_tokens=0)
        return _sse("message_start", message=message_value(self._head, [], usage)) + _PING

    def delta(self, delta: Delta) -> bytes:
        match delta:
            case TextDelta(text):
                return self._ensure("text") + self._delta(type="text_delta", text=text)
            case ReasoningDelta(text):
                if not self._show_reasoning:
                    return b""
                return self._ensure("thinking") + self._delta(type="thinking_delta", thinking=text)
            case CallDelta(_, call):
                return self._close() + self._call(call)

    def keepalive(self) -> bytes:
        return _PING

    def end(self, reply: FinishedReply) -> bytes:
        # Clients take a reply without blocks for a broken one (see ``content_value``).
        ended = self._close() if self._index or self._open else self._ensure("text") + self._close()
        usage = usage_value(reply.usage)
        return ended + _sse("message_delta", delta=stop(reply), usage=usage) + _sse("message_stop")

    def error(self, error: TurnstileError) -> bytes:
        return _sse(**error_value(error, in_stream=True))

    def _call(self, call: ToolCall) -> bytes:
        block: dict[str, Any] = {"type": "tool_use", "id": call.id, "name": call.name, "input": {}}
        opened = _sse("content_block_start", index=self._index, content_block=block)
        body = self._delta(type="input_json_delta", partial_json=strict_arguments(call.arguments))
        return opened + body + self._stop()

    def _ensure(self, kind: _Kind) -> bytes:
        """Opens a block of ``kind`` unless one is open."""
        if self._open == kind:
            return b""
        closed = self._close()
        self._open = kind
        return closed + _sse("content_block_start", index=self._index, content_block=_EMPTY[kind])

    def _close(self) -> bytes:
        kind, self._open = self._open, None
        match kind:
            case "thinking":
                return self._delta(type="signature_delta", signature=signature(self._head)) + self._stop()
            case "text":
                return self._stop()
            case None:
                return b""

    def _stop(self) -> bytes:
        stopped = _sse("content_block_stop", index=self._index)
        self._index += 1
        return stopped

    def _delta(self, **delta: str) -> bytes:
        return _sse("content_block_delta", index=self._index, delta=delta)


def _sse(type: str, **value: Any) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (type.encode(), orjson.dumps({"type": type, **value}))
