"""Anthropic Messages, outbound as a stream (https://docs.anthropic.com/en/docs/build-with-claude/streaming).

    message_start ping ( content_block_start content_block_delta+ content_block_stop | ping )*
    message_delta message_stop | error

Holds: at most one block is open; a block is of one kind; a thinking block ends with its signature.
"""

from __future__ import annotations

from typing import Any, Literal

import orjson

from turnstile.models import ToolCall
from turnstile_server.errors import TurnstileError
from turnstile_server.gate.dialects.anthropic_reply import (
    error_value,
    message_value,
    signature,
    stop,
    usage_value,
)
from turnstile_server.gate.dialects.base import (
    EVENT_STREAM,
    CallEvent,
    Event,
    Head,
    ReasoningEvent,
    Reply,
    TextEvent,
    Usage,
)
from turnstile_server.gate.dialects.json import strict_arguments

_PING = b'event: ping\ndata: {"type":"ping"}\n\n'
_Kind = Literal["text", "thinking"]
_EMPTY: dict[_Kind, dict[str, Any]] = {
    "text": {"type": "text", "text": ""},
    "thinking": {"type": "thinking", "thinking": "", "signature": ""},
}


class AnthropicStream:
    """``show_reasoning``: thinking blocks are written; else reasoning is left out."""

    content_type = EVENT_STREAM

    def __init__(self, head: Head, show_reasoning: bool) -> None:
        self._head = head
        self._show_reasoning = show_reasoning
        self._index = 0
        self._open: _Kind | None = None

    def start(self) -> bytes:
        usage = Usage(prompt_tokens=self._head.prompt_tokens, completion_tokens=0)
        return _sse("message_start", message=message_value(self._head, [], usage)) + _PING

    def event(self, event: Event) -> bytes:
        match event:
            case TextEvent(text):
                return self._ensure("text") + self._delta(type="text_delta", text=text)
            case ReasoningEvent(text):
                if not self._show_reasoning:
                    return b""
                return self._ensure("thinking") + self._delta(type="thinking_delta", thinking=text)
            case CallEvent(_, call):
                return self._close() + self._call(call)

    def keepalive(self) -> bytes:
        return _PING

    def end(self, reply: Reply) -> bytes:
        # A reply without blocks would be taken for a broken one (see ``content_value``).
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
        """Opens a block of ``kind`` where none is open."""
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
