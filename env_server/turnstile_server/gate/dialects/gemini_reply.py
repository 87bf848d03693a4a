"""Gemini generateContent, outbound: replies, and both forms of streams of them.

A stream is a sequence of ``GenerateContentResponse`` objects, each with what is new
(https://ai.google.dev/api/generate-content#method:-models.streamgeneratecontent): as server-sent events with
``?alt=sse``, as one JSON array without. What clients' readers force on the bytes:

- Google's own clients take an SSE comment for broken JSON, so a keep-alive is an empty line.
- They split events at any line break that Unicode or JavaScript knows, so U+0085, U+2028 and U+2029 are escaped.
- ``@google/genai`` raises only on an error that comes as bare JSON, without ``data:``; the Python package takes
  both.
- The Python package's chats forget a reply of which any event has no part, so the last one has an empty text.
"""

from __future__ import annotations

import base64
import re
from typing import Any, Protocol

import orjson

from turnstile.models import ToolCall
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

Part = dict[str, Any]

_STRING_OR_SPACE = re.compile(r'("(?:[^"\\]|\\.)*")|[ \t\r\n]+')
_ESCAPES = ((b"\xc2\x85", b"\\u0085"), (b"\xe2\x80\xa8", b"\\u2028"), (b"\xe2\x80\xa9", b"\\u2029"))
_EMPTY: Part = {"text": ""}


class Framing(Protocol):
    """How the objects of a stream follow each other."""

    content_type: str

    def start(self) -> bytes: ...

    def item(self, data: bytes) -> bytes: ...

    def end(self) -> bytes: ...

    def error(self, data: bytes) -> bytes:
        """The stream's last bytes, in place of ``end``."""
        ...


class EventFraming:
    content_type = EVENT_STREAM

    def start(self) -> bytes:
        return b""

    def item(self, data: bytes) -> bytes:
        return b"data: " + data + b"\n\n"

    def end(self) -> bytes:
        return b""

    def error(self, data: bytes) -> bytes:
        return data + b"\n"


class ArrayFraming:
    """At any time what was sent is JSON but for the closing bracket."""

    content_type = "application/json"

    def __init__(self) -> None:
        self._between = b""

    def start(self) -> bytes:
        return b"["

    def item(self, data: bytes) -> bytes:
        between, self._between = self._between, b",\n"
        return between + data

    def end(self) -> bytes:
        return b"]\n"

    def error(self, data: bytes) -> bytes:
        return self.item(data) + self.end()


def dumped(value: dict[str, Any]) -> bytes:
    """JSON on one line, by any reader's notion of a line."""
    data = orjson.dumps(value)
    for character, escape in _ESCAPES:
        data = data.replace(character, escape)
    return data


def reply_json(reply: Reply, thoughts: bool) -> dict[str, Any]:
    """A whole reply; ``thoughts``: whether the agent reads them. There is always a part."""
    message = reply.message
    parts: list[Part] = []
    if message.reasoning and thoughts:
        parts.append(_thought(message.reasoning))
    if message.content:
        parts.append({"text": message.content})
    parts += [_function_call(call, reply.head) for call in message.tool_calls]
    return _response(reply.head, parts or [_EMPTY], reply)


def event_json(event: Event, head: Head, thoughts: bool) -> dict[str, Any] | None:
    """What is new in a stream; None for what the agent does not read."""
    match event:
        case TextEvent(text):
            return _response(head, [{"text": text}])
        case ReasoningEvent(text):
            return _response(head, [_thought(text)]) if thoughts else None
        case CallEvent(_, call):
            return _response(head, [_function_call(call, head)])


def last_json(reply: Reply) -> dict[str, Any]:
    """The end of a stream: why it ended, and usage."""
    return _response(reply.head, [_EMPTY], reply)


def _response(head: Head, parts: list[Part], ended: Reply | None = None) -> dict[str, Any]:
    candidate: dict[str, Any] = {"content": {"parts": parts, "role": "model"}, "index": 0}
    response: dict[str, Any] = {"candidates": [candidate]}
    if ended is not None:
        candidate["finishReason"] = "MAX_TOKENS" if ended.finish == "length" else "STOP"
        response["usageMetadata"] = _usage(ended.usage)
    return {**response, "modelVersion": head.model, "responseId": head.named("gemini-")}


def _thought(text: str) -> Part:
    return {"text": text, "thought": True}


def _function_call(call: ToolCall, head: Head) -> Part:
    """The arguments as the model wrote them, but for spaces and what strict clients do not read.

    Clients of thinking models want a signature beside a call and send it back; it says nothing here."""
    args = orjson.Fragment(_STRING_OR_SPACE.sub(lambda found: found[1] or "", strict_arguments(call.arguments)))
    return {
        "functionCall": {"id": call.id, "name": call.name, "args": args},
        "thoughtSignature": base64.b64encode(head.turn_id.encode()).decode(),
    }


def _usage(usage: Usage) -> dict[str, int]:
    return {
        "promptTokenCount": usage.prompt_tokens,
        "candidatesTokenCount": usage.completion_tokens,
        "totalTokenCount": usage.prompt_tokens + usage.completion_tokens,
        "cachedContentTokenCount": usage.cached_tokens,
    }
