"""The objects of a Responses reply: output items, the response around them, usage, error codes.

Item ids follow from the turn and the item's place (``msg_{turn}_{index}``), so every caller of a turn gets the
same ids. ``status`` is ``in_progress``, ``completed`` or ``incomplete``.
(https://platform.openai.com/docs/api-reference/responses/object)
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Sequence
from typing import Any

import orjson

from turnstile.models import ToolCall
from turnstile_server.errors import ContextOverflow, TurnstileError
from turnstile_server.gate.dialects.base import FinishedReply, ModelRequest, ReplyHead, Usage, WireTool
from turnstile_server.gate.dialects.responses.tools import custom_input

Item = dict[str, Any]

_DEFAULTS: dict[str, Any] = {
    "instructions": None,
    "max_output_tokens": None,
    "max_tool_calls": None,
    "metadata": {},
    "parallel_tool_calls": True,
    "reasoning": {"effort": None, "summary": None},
    "temperature": None,
    "text": {"format": {"type": "text"}},
    "tool_choice": "auto",
    "tools": [],
    "top_p": None,
}
"""The fields that repeat the request and are always present, with their defaults."""

_MARK = "turnstile-v1."


def reasoning_item(head: ReplyHead, index: int, text: str, status: str) -> Item:
    """A reasoning item. The whole reasoning is the summary, because agents read and show the summary.

    It is also in ``encrypted_content``, asked for or not: Qwen Code turns reasoning that comes without it into a
    reply of the model.
    """
    done = status != "in_progress"
    return {
        "id": _id(head, "rs", index),
        "type": "reasoning",
        "summary": [summary_part(text)] if done else [],
        "encrypted_content": sealed(text) if done else None,
        "status": status,
    }


def message_item(head: ReplyHead, index: int, text: str, status: str) -> Item:
    return {
        "id": _id(head, "msg", index),
        "type": "message",
        "role": "assistant",
        "content": [text_part(text)] if status != "in_progress" else [],
        "status": status,
    }


def call_item(head: ReplyHead, index: int, call: ToolCall, wire_tool: WireTool, status: str) -> Item:
    """A function or custom call. While it is in progress it has no arguments."""
    begun = status == "in_progress"
    item: Item = {"id": _id(head, "ctc" if wire_tool.custom else "fc", index)}
    if wire_tool.custom:
        item |= {"type": "custom_tool_call", "input": "" if begun else custom_input(call.arguments)}
    else:
        item |= {"type": "function_call", "arguments": "" if begun else call.arguments}
    item |= {"call_id": call.id or item["id"], "name": wire_tool.name, "status": status}
    if wire_tool.namespace is not None:
        item["namespace"] = wire_tool.namespace
    return item


def text_part(text: str) -> Item:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def summary_part(text: str) -> Item:
    return {"type": "summary_text", "text": text}


def response_object(
    head: ReplyHead,
    request: ModelRequest,
    output: Sequence[Item],
    status: str = "in_progress",
    *,
    reply: FinishedReply | None = None,
    error: TurnstileError | None = None,
) -> Item:
    """The response around the output items. ``reply``: once it is finished; ``error``: once it failed."""
    return {
        "id": head.named("resp_"),
        "object": "response",
        "created_at": head.created,
        "status": status,
        "model": head.model,
        "output": output,
        "error": None if error is None else {"code": error_code(error), "message": error.message},
        "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
        "usage": None if reply is None else _usage(reply.usage),
        **_DEFAULTS,
        **{key: orjson.Fragment(value) for key, value in request.wire.items()},
        "background": False,
        "previous_response_id": None,
        "store": False,
        "truncation": "disabled",
    }


def status_of(reply: FinishedReply) -> str:
    return "incomplete" if reply.finish == "length" else "completed"


def error_code(error: TurnstileError) -> str:
    """The code of an error inside a stream: one of OpenAI's, by which clients decide whether to try again."""
    if isinstance(error, ContextOverflow):
        return "context_length_exceeded"
    if not error.retryable:
        return "invalid_prompt"
    return "rate_limit_exceeded" if error.status == 429 else "server_error"


def _usage(usage: Usage) -> Item:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


def _id(head: ReplyHead, prefix: str, index: int) -> str:
    return f"{head.named(prefix + '_')}_{index}"


def sealed(reasoning: str) -> str:
    return _MARK + base64.b64encode(reasoning.encode()).decode()


def unsealed(content: str) -> str | None:
    """The reasoning in a text that ``sealed`` made; None for any other text."""
    if not content.startswith(_MARK):
        return None
    try:
        return base64.b64decode(content[len(_MARK) :], validate=True).decode()
    except (binascii.Error, ValueError):  # cut or changed on the way
        return None
