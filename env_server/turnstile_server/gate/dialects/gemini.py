"""Gemini generateContent as a dialect (https://ai.google.dev/api): its endpoints, answers, streams and errors.

Served below ``/v1beta`` and ``/v1``: official clients use either. Chat Completions lists models at ``/v1/models``
too, so there this dialect answers only those who send their key as Google's clients do.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import orjson

from turnstile_server.errors import BudgetExhausted, ContextOverflow, TurnstileError
from turnstile_server.gate.dialects.base import (
    NO_PARAMS,
    Endpoint,
    Event,
    Head,
    ModelCall,
    Purpose,
    Reply,
    StreamWriter,
)
from turnstile_server.gate.dialects.gemini_reply import (
    ArrayFraming,
    EventFraming,
    Framing,
    dumped,
    event_json,
    last_json,
    reply_json,
)
from turnstile_server.gate.dialects.gemini_request import parse_gemini
from turnstile_server.gate.dialects.parse_cache import ParseCache

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


def _endpoints(version: str, header: str | None) -> tuple[Endpoint, ...]:
    """``header``: what a request must have to be asking this dialect for models."""
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
    """Names of models may hold ``/`` and ``:`` here: the method follows the last colon."""
    pattern = re.compile(f"{models}/(?P<model>.+):(?P<method>{name})")
    return Endpoint(pattern, purpose, ("POST",), f"{models}/{{model}}:{name}")


class GeminiDialect:
    name = "gemini"
    endpoints = (*_endpoints("v1beta", None), *_endpoints("v1", KEY_HEADER))

    def parse(
        self, body: bytes, before: ParseCache | None = None, params: Mapping[str, str] = NO_PARAMS
    ) -> ModelCall:
        return parse_gemini(body, before, params)

    def count(self, tokens: int) -> bytes:
        return orjson.dumps({"totalTokens": tokens})

    def reply(self, reply: Reply, call: ModelCall) -> bytes:
        return dumped(reply_json(reply, call.show_reasoning))

    def stream(self, head: Head, call: ModelCall) -> StreamWriter:
        framing = EventFraming() if call.wire.get("sse") else ArrayFraming()
        return _GeminiStream(head, call.show_reasoning, framing)

    def error(self, error: TurnstileError) -> bytes:
        """Our stable type is the ``ErrorInfo``'s, in ``metadata.type``."""
        return dumped({"error": _status(error)})

    def models(self, name: str, context_length: int) -> bytes:
        return orjson.dumps({"models": [_model(name, context_length)]})

    def model(self, name: str, context_length: int) -> bytes:
        return orjson.dumps(_model(name, context_length))


class _GeminiStream:
    def __init__(self, head: Head, thoughts: bool, framing: Framing) -> None:
        self.content_type = framing.content_type
        self._head = head
        self._thoughts = thoughts
        self._framing = framing

    def start(self) -> bytes:
        return self._framing.start()

    def event(self, event: Event) -> bytes:
        response = event_json(event, self._head, self._thoughts)
        # Thoughts that are not shown are no silence, so nobody else keeps the connection alive meanwhile.
        return self.keepalive() if response is None else self._framing.item(dumped(response))

    def keepalive(self) -> bytes:
        return b"\n"

    def end(self, reply: Reply) -> bytes:
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
    if isinstance(error, ContextOverflow):  # the words by which agents know that they must compact
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
