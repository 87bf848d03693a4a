"""Anthropic Messages, outbound, and the dialect as a whole (https://docs.anthropic.com/en/api/messages).

``anthropic_request`` and ``anthropic_messages`` read, ``anthropic_reply`` and ``anthropic_stream`` write.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import orjson

from turnstile_server.errors import TurnstileError
from turnstile_server.gate.dialects.anthropic_reply import content_value, error_value, message_value, stop
from turnstile_server.gate.dialects.anthropic_request import COUNTING, parse_anthropic
from turnstile_server.gate.dialects.anthropic_stream import AnthropicStream
from turnstile_server.gate.dialects.base import (
    NO_PARAMS,
    Endpoint,
    Head,
    ModelCall,
    Purpose,
    Reply,
    StreamWriter,
    endpoint,
)
from turnstile_server.gate.dialects.parse_cache import ParseCache

_VERSION = "anthropic-version"
"""The header of every request of this API; OpenAI's models are listed at the same paths."""

_COUNT = Endpoint(
    pattern=re.compile(rf"/v1/messages/(?P<{COUNTING}>count_tokens)"),
    purpose=Purpose.COUNT,
    methods=("POST",),
    shown="/v1/messages/count_tokens",
)


class AnthropicDialect:
    name = "anthropic"
    endpoints = (
        endpoint("/v1/messages", Purpose.TURN),
        _COUNT,
        endpoint("/v1/models", Purpose.MODELS, header=_VERSION),
        endpoint("/v1/models/{model}", Purpose.MODEL, header=_VERSION),
        endpoint("/api/hello", Purpose.PROBE),
        endpoint("/", Purpose.PROBE),
    )

    def parse(
        self, body: bytes, before: ParseCache | None = None, params: Mapping[str, str] = NO_PARAMS
    ) -> ModelCall:
        return parse_anthropic(body, before, params)

    def count(self, tokens: int) -> bytes:
        return orjson.dumps({"input_tokens": tokens})

    def reply(self, reply: Reply, call: ModelCall) -> bytes:
        content = content_value(reply.message, reply.head, call.show_reasoning)
        return orjson.dumps({**message_value(reply.head, content, reply.usage), **stop(reply)})

    def stream(self, head: Head, call: ModelCall) -> StreamWriter:
        return AnthropicStream(head, call.show_reasoning)

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
