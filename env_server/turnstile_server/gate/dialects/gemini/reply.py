"""Gemini generateContent, outbound: replies, both forms of stream, errors, and the dialect itself.

(https://ai.google.dev/api) Served below ``/v1beta`` and ``/v1``: official clients use either. Chat Completions
lists models at ``/v1/models`` too, so there this dialect answers only requests with Google's key header.

A stream is a sequence of ``GenerateContentResponse`` objects, each with what is new
(https://ai.google.dev/api/generate-content#method:-models.streamgeneratecontent): server-sent events with
``?alt=sse``, one JSON array without. What clients' readers require of the bytes:

- Google's own clients take an SSE comment for broken JSON, so a keep-alive is an empty line.
- They split events at any line break that Unicode or JavaScript knows, so U+0085, U+2028 and U+2029 are escaped.
- ``@google/genai`` raises only on an error that comes as bare JSON, without ``data:``; the Python package takes
  both.
- The Python package's chats forget a reply of which any event has no part, so the last event has an empty text.
"""

from __future__ import annotations

import base64
import re
from typing import Any, Protocol

import orjson

from turnstile.models import ToolCall
from turnstile_server.errors import BudgetExhausted, ContextOverflow, TurnstileError
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
)
from turnstile_server.gate.dialects.gemini.request import HISTORY, parse_gemini
from turnstile_server.gate.dialects.json import strict_arguments
from turnstile_server.rendering.protocol import CallDelta, Delta, ReasoningDelta, TextDelta

KEY_HEADER = "x-goog-api-key"

_STATUSES = {
    401: "UNAUTHENTICATED",
    403: "PERMISSION_DENIED",
    404: "NOT_FOUND",
    408: "DEADLINE_EXCEEDED",
    409: "ABORTED",
    410: "FAILED_PRECONDITION",
    429: "RESOURCE_EXHAUSTED",
    500: "INTERNAL",
    501: "UNIMPLEMENTED",
    502: "UNAVAILABLE",
    503: "UNAVAILABLE",
    504: "DEADLINE_EXCEEDED",
}
"""Names of google.rpc.Code (https://cloud.google.com/apis/design/errors#handling_errors)."""

PartJson = dict[str, Any]
_STRING_OR_SPACE = re.compile(r'("(?:[^"\\]|\\.)*")|[ \t\r\n]+')
_ESCAPES = ((b"\xc2\x85", b"\\u0085"), (b"\xe2\x80\xa8", b"\\u2028"), (b"\xe2\x80\xa9", b"\\u2029"))
_EMPTY: PartJson = {"text": ""}


def _endpoints(version: str, header: str | None) -> tuple[Endpoint, ...]:
    """``header``: what a request must have to get this dialect's list of models."""
    models = f"/{version}/models"
    return (
        _method(models, "generateContent", Purpose.TURN),
        _method(models, "streamGenerateContent", Purpose.TURN),
        _method(models, "countTokens", Purpose.COUNT),
        Endpoint(re.compile(models), Purpose.MODELS, ("GET", "HEAD"), models, header),
        Endpoint(
            re.compile(f"{models}/(?P<model>[^:]+)"), Purpose.MODEL, ("GET", "HEAD"), f"{models}/{{model}}", header
        ),
    )


def _method(models: str, name: str, purpose: Purpose) -> Endpoint:
    """A method of a model. Names of models may have ``/`` and ``:``; the method follows the last colon."""
    pattern = re.compile(f"{models}/(?P<model>.+):(?P<method>{name})")
    return Endpoint(pattern, purpose, ("POST",), f"{models}/{{model}}:{name}")


class GeminiDialect:
    name = "gemini"
    history = HISTORY
    endpoints = (*_endpoints("v1beta", None), *_endpoints("v1", KEY_HEADER))

    def parse(self, body: bytes, context: BodyContext = NO_CONTEXT) -> ModelRequest:
        return parse_gemini(body, context)

    def count(self, tokens: int) -> bytes:
        return orjson.dumps({"totalTokens": tokens})

    def reply(self, reply: FinishedReply, request: ModelRequest) -> bytes:
        return dumped(reply_json(reply, request.show_reasoning))

    def stream(self, head: ReplyHead, request: ModelRequest) -> StreamWriter:
        framing = EventFraming() if request.wire.get("sse") else ArrayFraming()
        return _GeminiStream(head, request.show_reasoning, framing)

    def error(self, error: TurnstileError) -> bytes:
        """An error; the stable type of ``errors.py`` is in the ``ErrorInfo``'s ``metadata.type``."""
        return dumped({"error": _status(error)})

    def models(self, name: str, context_length: int) -> bytes:
        return orjson.dumps({"models": [_model(name, context_length)]})

    def model(self, name: str, context_length: int) -> bytes:
        return orjson.dumps(_model(name, context_length))


class _GeminiStream:
    def __init__(self, head: ReplyHead, thoughts: bool, framing: Framing) -> None:
        self.content_type = framing.content_type
        self._head = head
        self._thoughts = thoughts
        self._framing = framing

    def start(self) -> bytes:
        return self._framing.start()

    def delta(self, delta: Delta) -> bytes:
        response = delta_json(delta, self._head, self._thoughts)
        # The server sends no keep-alive while deltas come, so hidden thoughts must send one.
        return self.keepalive() if response is None else self._framing.item(dumped(response))

    def keepalive(self) -> bytes:
        return b"\n"

    def end(self, reply: FinishedReply) -> bytes:
        return self._framing.item(dumped(last_json(reply))) + self._framing.end()

    def error(self, error: TurnstileError) -> bytes:
        return self._framing.error(GeminiDialect().error(error))


def _status(error: TurnstileError) -> dict[str, Any]:
    """A google.rpc.Status (https://cloud.google.com/apis/design/errors)."""
    metadata = {"type": error.type}
    if error.detail is not None:
        metadata["detail"] = orjson.dumps(error.detail).decode()
    info = {
        "@type": "type.googleapis.com/google.rpc.ErrorInfo",
        "reason": error.type.upper(),
        "domain": "turnstile",
        "metadata": metadata,
    }
    details: list[dict[str, Any]] = [info]
    if error.retry_after_s is not None:
        retry = {"@type": "type.googleapis.com/google.rpc.RetryInfo", "retryDelay": f"{error.retry_after_s:g}s"}
        details.append(retry)
    return {"code": error.status, "message": _message(error), "status": _name(error), "details": details}


def _message(error: TurnstileError) -> str:
    if isinstance(error, ContextOverflow):  # agents compact when they read these words
        return f"The input token count exceeds the maximum number of tokens allowed: {error.message}"
    return error.message


def _name(error: TurnstileError) -> str:
    if isinstance(error, BudgetExhausted):
        return "FAILED_PRECONDITION"
    return _STATUSES.get(error.status, "INTERNAL" if error.status >= 500 else "INVALID_ARGUMENT")


def _model(name: str, context_length: int) -> dict[str, Any]:
    return {
        "name": f"models/{name.removeprefix('models/')}",
        "version": "turnstile",
        "displayName": name,
        "inputTokenLimit": context_length,
        "outputTokenLimit": context_length,
        "supportedGenerationMethods": ["generateContent", "countTokens", "streamGenerateContent"],
    }


class Framing(Protocol):
    """The bytes before, around and after the objects of a stream."""

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
    """One JSON array. At any time, the bytes sent so far and a closing bracket are JSON."""

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
    """JSON on one line, whichever characters a reader takes for line breaks."""
    data = orjson.dumps(value)
    for character, escape in _ESCAPES:
        data = data.replace(character, escape)
    return data


def reply_json(reply: FinishedReply, thoughts: bool) -> dict[str, Any]:
    """A whole reply, which always has a part. ``thoughts``: whether the agent reads them."""
    message = reply.message
    parts: list[PartJson] = []
    if message.reasoning and thoughts:
        parts.append(_thought(message.reasoning))
    if message.content:
        parts.append({"text": message.content})
    parts += [_function_call(call, reply.head) for call in message.tool_calls]
    return _response(reply.head, parts or [_EMPTY], reply)


def delta_json(delta: Delta, head: ReplyHead, thoughts: bool) -> dict[str, Any] | None:
    """The response object for what is new in a stream; None for what the agent does not read."""
    match delta:
        case TextDelta(text):
            return _response(head, [{"text": text}])
        case ReasoningDelta(text):
            return _response(head, [_thought(text)]) if thoughts else None
        case CallDelta(_, call):
            return _response(head, [_function_call(call, head)])


def last_json(reply: FinishedReply) -> dict[str, Any]:
    """The last object of a stream: why it ended, and usage."""
    return _response(reply.head, [_EMPTY], reply)


def _response(head: ReplyHead, parts: list[PartJson], ended: FinishedReply | None = None) -> dict[str, Any]:
    candidate: dict[str, Any] = {"content": {"parts": parts, "role": "model"}, "index": 0}
    response: dict[str, Any] = {"candidates": [candidate]}
    if ended is not None:
        candidate["finishReason"] = "MAX_TOKENS" if ended.finish == "length" else "STOP"
        response["usageMetadata"] = _usage(ended.usage)
    return {**response, "modelVersion": head.model, "responseId": head.named("gemini-")}


def _thought(text: str) -> PartJson:
    return {"text": text, "thought": True}


def _function_call(call: ToolCall, head: ReplyHead) -> PartJson:
    """A function call, its arguments as the model wrote them but for spaces and what strict clients do not read.

    Clients of thinking models expect a signature beside a call and send it back; it carries nothing here.
    """
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
