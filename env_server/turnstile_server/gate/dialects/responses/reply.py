"""OpenAI Responses, outbound: replies, streams, and the dialect itself.

Nothing is stored: the response object says ``store: false``, and no response can be retrieved or continued by
id. Models are listed at the same path as for Chat Completions, which answers there. A stream
(https://platform.openai.com/docs/api-reference/responses-streaming):

    response.created, response.in_progress,
    per item: output_item.added, its parts and deltas, output_item.done,
    response.completed | response.incomplete | (response.failed, error)

An item opens when its first text arrives and closes when another kind of event follows, so text behind a call
is an item of its own. Every event has the next ``sequence_number``. The items of the terminal event are those
that were streamed. A keep-alive is one more ``response.in_progress``.
"""

from __future__ import annotations

from typing import Any, Literal

import orjson

from turnstile.models import ToolCall
from turnstile_server.errors import TurnstileError
from turnstile_server.gate.dialects.base import (
    EVENT_STREAM,
    NO_CONTEXT,
    BodyContext,
    FinishedReply,
    ModelRequest,
    Purpose,
    ReplyHead,
    StreamWriter,
    WireTool,
    endpoint,
)
from turnstile_server.gate.dialects.openai import error_body, model_body, models_body
from turnstile_server.gate.dialects.responses.items import (
    Item,
    call_item,
    error_code,
    message_item,
    reasoning_item,
    response_object,
    status_of,
    summary_part,
    text_part,
)
from turnstile_server.gate.dialects.responses.request import HISTORY, parse_responses
from turnstile_server.rendering.protocol import CallDelta, Delta, ReasoningDelta, TextDelta

_Kind = Literal["message", "reasoning"]
_DELTAS = {"arguments": "function_call_arguments", "input": "custom_tool_call_input"}
"""The event that carries a field of a call."""


class ResponsesDialect:
    name = "responses"
    history = HISTORY
    endpoints = (
        endpoint("/v1/responses", Purpose.TURN),
        endpoint("/v1/responses/input_tokens", Purpose.COUNT),
    )

    def parse(self, body: bytes, context: BodyContext = NO_CONTEXT) -> ModelRequest:
        return parse_responses(body, context)

    def count(self, tokens: int) -> bytes:
        return orjson.dumps({"object": "response.input_tokens", "input_tokens": tokens})

    def reply(self, reply: FinishedReply, request: ModelRequest) -> bytes:
        return orjson.dumps(
            response_object(reply.head, request, _output(reply, request), status_of(reply), reply=reply)
        )

    def stream(self, head: ReplyHead, request: ModelRequest) -> StreamWriter:
        return ResponsesStream(head, request)

    def error(self, error: TurnstileError) -> bytes:
        return error_body(error)

    def models(self, name: str, context_length: int) -> bytes:
        return models_body(name, context_length)

    def model(self, name: str, context_length: int) -> bytes:
        return model_body(name, context_length)


def _output(reply: FinishedReply, request: ModelRequest) -> list[Item]:
    """The output items of a whole reply: reasoning, then text, then calls.

    A reply without a call always has a message, even an empty one: agents send an empty reply back only if it has
    a message.
    """
    head, message = reply.head, reply.message
    output: list[Item] = []
    last = "completed" if message.tool_calls else status_of(reply)
    if message.reasoning:
        output.append(reasoning_item(head, 0, message.reasoning, "completed" if message.content else last))
    if message.content or not message.tool_calls:
        output.append(message_item(head, len(output), message.content, last))
    for written in message.tool_calls:
        wire_tool = request.wire_tools.get(written.name) or WireTool(written.name)
        output.append(call_item(head, len(output), written, wire_tool, "completed"))
    return output


class ResponsesStream:
    content_type = EVENT_STREAM

    def __init__(self, head: ReplyHead, request: ModelRequest) -> None:
        self._head = head
        self._request = request
        self._sequence = 0
        self._done: list[Item] = []
        self._open: _Kind | None = None
        self._id = ""
        self._texts: list[str] = []
        self._answered = False
        """A message or a call was written."""

    def start(self) -> bytes:
        begun = response_object(self._head, self._request, [])
        return self._sse("response.created", response=begun) + self._sse("response.in_progress", response=begun)

    def delta(self, delta: Delta) -> bytes:
        match delta:
            case TextDelta(text):
                self._answered = True
                return self._text("message", text)
            case ReasoningDelta(text):
                return self._text("reasoning", text)
            case CallDelta(_, call):
                self._answered = True
                return self._close("completed") + self._called(call)

    def keepalive(self) -> bytes:
        """One more ``response.in_progress``, which every client ignores.

        A comment would not do: Codex's idle timer does not count comments.
        """
        return self._sse("response.in_progress", response=response_object(self._head, self._request, []))

    def end(self, reply: FinishedReply) -> bytes:
        status = status_of(reply)
        tail = self._close(status if self._open else "completed")
        if not self._answered:  # agents send an empty reply back only if it has a message
            tail += self._text("message", "") + self._close(status)
        whole = response_object(self._head, self._request, self._done, status, reply=reply)
        return tail + self._sse(f"response.{status}", response=whole)

    def error(self, error: TurnstileError) -> bytes:
        """``response.failed`` and then ``error``.

        Codex, Pi and Qwen Code decide by the first one's code whether to try again; SDKs raise on the second. An
        item that was begun stays open, because a finished item would enter an agent's history.
        """
        code = error_code(error)
        fault = {"type": error.type, "code": code, "message": error.message, "param": None}
        failed = response_object(self._head, self._request, self._done, "failed", error=error)
        return self._sse("response.failed", response=failed) + self._sse(
            "error", code=code, message=error.message, param=None, error=fault
        )

    def _text(self, kind: _Kind, text: str) -> bytes:
        opening = b""
        if self._open != kind:
            opening = self._close("completed") + self._begin(kind)
        self._texts.append(text)
        if not text:
            return opening
        if kind == "message":
            delta = self._of_part("response.output_text.delta", delta=text, logprobs=[])
        else:
            delta = self._of_part("response.reasoning_summary_text.delta", delta=text)
        return opening + delta

    def _begin(self, kind: _Kind) -> bytes:
        item = self._item(kind, "in_progress")
        self._open, self._id, self._texts = kind, item["id"], []
        opening = self._sse("response.output_item.added", output_index=len(self._done), item=item)
        if kind == "message":
            return opening + self._of_part("response.content_part.added", part=text_part(""))
        return opening + self._of_part("response.reasoning_summary_part.added", part=summary_part(""))

    def _close(self, status: str) -> bytes:
        if self._open is None:
            return b""
        text = "".join(self._texts)
        if self._open == "message":
            closing = self._of_part("response.output_text.done", text=text, logprobs=[])
            closing += self._of_part("response.content_part.done", part=text_part(text))
        else:
            closing = self._of_part("response.reasoning_summary_text.done", text=text)
            closing += self._of_part("response.reasoning_summary_part.done", part=summary_part(text))
        item = self._item(self._open, status)
        self._open = None
        return closing + self._finish(item)

    def _called(self, call: ToolCall) -> bytes:
        wire_tool = self._request.wire_tools.get(call.name) or WireTool(call.name)
        index = len(self._done)
        begun = call_item(self._head, index, call, wire_tool, "in_progress")
        item = call_item(self._head, index, call, wire_tool, "completed")
        field = "input" if wire_tool.custom else "arguments"
        name = f"response.{_DELTAS[field]}"
        written = item[field]
        place = {"item_id": item["id"], "output_index": index}
        return b"".join(
            (
                self._sse("response.output_item.added", output_index=index, item=begun),
                self._sse(f"{name}.delta", **place, delta=written) if written else b"",
                self._sse(f"{name}.done", **place, **{field: written}),
                self._finish(item),
            )
        )

    def _finish(self, item: Item) -> bytes:
        index = len(self._done)
        self._done.append(item)
        return self._sse("response.output_item.done", output_index=index, item=item)

    def _item(self, kind: _Kind, status: str) -> Item:
        make = message_item if kind == "message" else reasoning_item
        return make(self._head, len(self._done), "".join(self._texts), status)

    def _of_part(self, name: str, **fields: Any) -> bytes:
        """An event of the open item's only part."""
        part = "content_index" if self._open == "message" else "summary_index"
        return self._sse(name, item_id=self._id, output_index=len(self._done), **{part: 0}, **fields)

    def _sse(self, name: str, **fields: Any) -> bytes:
        event = {"type": name, "sequence_number": self._sequence, **fields}
        self._sequence += 1
        return b"event: " + name.encode() + b"\ndata: " + orjson.dumps(event) + b"\n\n"
