"""Anthropic's message, usage and error objects: what the whole reply and the stream have in common."""

from __future__ import annotations

import base64
from typing import Any

import orjson

from turnstile.models import Message
from turnstile_server.errors import ContextOverflow, TurnstileError
from turnstile_server.gate.dialects.base import Head, Reply, Usage
from turnstile_server.gate.dialects.json import strict_arguments

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


def message_value(head: Head, content: list[dict[str, Any]], usage: Usage) -> dict[str, Any]:
    """A message that has not stopped yet."""
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


def content_value(message: Message, head: Head, show_reasoning: bool) -> list[dict[str, Any]]:
    """The blocks of a whole reply. A reply that says nothing is one empty text block: there are clients that take
    a reply without blocks for a broken one, or read ``content[0].text`` of every reply."""
    blocks: list[dict[str, Any]] = []
    if message.reasoning and show_reasoning:
        blocks.append({"type": "thinking", "thinking": message.reasoning, "signature": signature(head)})
    if message.content:
        blocks.append({"type": "text", "text": message.content})
    for call in message.tool_calls:
        written = orjson.Fragment(strict_arguments(call.arguments))
        blocks.append({"type": "tool_use", "id": call.id, "name": call.name, "input": written})
    return blocks or [{"type": "text", "text": ""}]


def signature(head: Head) -> str:
    """Of a thinking block. It is never checked: a reply is known by its content, and ours is what is fed."""
    return base64.b64encode(head.named("turnstile ").encode()).decode()


def stop(reply: Reply) -> dict[str, Any]:
    """Why the reply stopped. A reply that was cut off is that first, as on Chat: calls may be missing."""
    if reply.finish == "length":
        return {"stop_reason": "max_tokens", "stop_sequence": None}
    if reply.message.tool_calls:
        return {"stop_reason": "tool_use", "stop_sequence": None}
    if reply.stop_string is not None:
        return {"stop_reason": "stop_sequence", "stop_sequence": reply.stop_string}
    return {"stop_reason": "end_turn", "stop_sequence": None}


def usage_value(usage: Usage) -> dict[str, Any]:
    """``input_tokens`` are those that were computed; with those read from the cache they are the prompt."""
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
    }


def error_value(error: TurnstileError, *, in_stream: bool = False) -> dict[str, Any]:
    """``details.error_code`` is our stable type, ``type`` the nearest of Anthropic's.

    In a stream the HTTP status said 200 before, so the type alone tells clients to ask again: they do for
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
    """Clients that compact when the context is full know it by these words of the API's, and by nothing else."""
    match error:
        case ContextOverflow(detail={"prompt_tokens": int(prompt), "context_length": int(context)}):
            return f"prompt is too long: {prompt} tokens > {context - 1} maximum"
        case ContextOverflow():
            return f"prompt is too long: {error.message}"
        case _:
            return error.message
