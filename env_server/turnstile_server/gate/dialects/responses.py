"""OpenAI Responses, outbound, and the dialect as a whole.

Stateless: the response object says ``store: false``, and nothing can be retrieved or continued by id. Models are
listed at the same path as for Chat Completions, which answers there.
"""

from __future__ import annotations

from collections.abc import Mapping

import orjson

from turnstile_server.errors import TurnstileError
from turnstile_server.gate.dialects.base import (
    NO_PARAMS,
    Head,
    ModelCall,
    Purpose,
    Reply,
    StreamWriter,
    WireTool,
    endpoint,
)
from turnstile_server.gate.dialects.openai_shared import error_body, model_body, models_body
from turnstile_server.gate.dialects.parse_cache import ParseCache
from turnstile_server.gate.dialects.responses_items import (
    Item,
    call_item,
    message_item,
    reasoning_item,
    response_object,
    status_of,
)
from turnstile_server.gate.dialects.responses_request import parse_responses
from turnstile_server.gate.dialects.responses_stream import ResponsesStream


class ResponsesDialect:
    name = "responses"
    endpoints = (
        endpoint("/v1/responses", Purpose.TURN),
        endpoint("/v1/responses/input_tokens", Purpose.COUNT),
    )

    def parse(
        self, body: bytes, before: ParseCache | None = None, params: Mapping[str, str] = NO_PARAMS
    ) -> ModelCall:
        return parse_responses(body, before)

    def count(self, tokens: int) -> bytes:
        return orjson.dumps({"object": "response.input_tokens", "input_tokens": tokens})

    def reply(self, reply: Reply, call: ModelCall) -> bytes:
        return orjson.dumps(response_object(reply.head, call, _output(reply, call), status_of(reply), reply=reply))

    def stream(self, head: Head, call: ModelCall) -> StreamWriter:
        return ResponsesStream(head, call)

    def error(self, error: TurnstileError) -> bytes:
        return error_body(error)

    def models(self, name: str, context_length: int) -> bytes:
        return models_body(name, context_length)

    def model(self, name: str, context_length: int) -> bytes:
        return model_body(name, context_length)


def _output(reply: Reply, call: ModelCall) -> list[Item]:
    """Reasoning, then text, then calls. Without a call there always is a message, be it empty: agents send an
    empty answer back only if there is one."""
    head, message = reply.head, reply.message
    output: list[Item] = []
    last = "completed" if message.tool_calls else status_of(reply)
    if message.reasoning:
        output.append(reasoning_item(head, 0, message.reasoning, "completed" if message.content else last))
    if message.content or not message.tool_calls:
        output.append(message_item(head, len(output), message.content, last))
    for written in message.tool_calls:
        wire_tool = call.wire_tools.get(written.name) or WireTool(written.name)
        output.append(call_item(head, len(output), written, wire_tool, "completed"))
    return output
