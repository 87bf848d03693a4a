"""A hosted model behind Anthropic's Messages, by Anthropic's own client.

https://platform.claude.com/docs/en/api/messages. Replies are always streamed, as over Chat Completions.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Mapping
from itertools import takewhile
from typing import Any, Final, Literal

import anthropic
import httpx2

from turnstile.models import Message, ToolCall, UpstreamUsage
from turnstile_server.engines.upstream.failures import refused, unreachable
from turnstile_server.engines.upstream.protocol import UpstreamCall, UpstreamFinish, UpstreamModel, UpstreamPiece
from turnstile_server.errors import EngineProtocolError

_LENGTHS: Final[Mapping[str, Literal["stop", "length"]]] = {
    "max_tokens": "length",
    "model_context_window_exceeded": "length",
}


_COUNTED: Final = frozenset({"model", "messages", "system", "tools", "tool_choice"})


class MessagesUpstream(UpstreamModel):
    """``client``: with the server's address and key; this object closes it."""

    format = "Messages"

    def __init__(self, client: anthropic.AsyncAnthropic, model: str, context_length: int | None = None) -> None:
        self._client = client
        self._model = model
        self._context_length = context_length

    @property
    def context_length(self) -> int | None:
        return self._context_length

    async def close(self) -> None:
        await self._client.close()

    async def count(self, call: UpstreamCall) -> int:
        wanted = {name: value for name, value in self._body(call).items() if name in _COUNTED}
        try:
            counted = await self._client.messages.count_tokens(**wanted)
        except anthropic.APIError as error:
            raise _error_of(error) from error
        return counted.input_tokens

    async def answer(self, call: UpstreamCall) -> AsyncGenerator[UpstreamPiece]:
        reply = _Reply(self._model)
        client = self._client if call.tried_again else self._client.with_options(max_retries=0)
        try:
            stream = await client.messages.create(**self._body(call), stream=True)
            async with stream:
                async for event in stream:
                    yield reply.take(event)
            yield UpstreamPiece(finish=reply.finish())
        except anthropic.APIError as error:
            raise _error_of(error) from error
        except httpx2.HTTPError as error:
            raise unreachable(error) from error
        except (AttributeError, TypeError, ValueError, KeyError) as error:
            raise EngineProtocolError(f"the upstream's stream is not one of Messages: {error}") from error

    def _body(self, call: UpstreamCall) -> dict[str, Any]:
        sampling, extra = call.sampling, {}
        system, messages = anthropic_messages(call.messages)
        body: dict[str, Any] = {"model": self._model, "messages": messages, "max_tokens": call.max_tokens}
        if system:
            body["system"] = system
        if call.stop:
            body["stop_sequences"] = list(call.stop)
        if call.tools:
            body["tools"] = [_tool(tool.spec["function"]) for tool in call.tools]
            if not call.may_call:
                body["tool_choice"] = {"type": "none"}
            elif call.forced_call is not None:
                named = {"type": "tool", "name": call.forced_call}
                body["tool_choice"] = named if call.forced_call else {"type": "any"}
        if call.json_schema is not None:
            body["output_config"] = {"format": {"type": "json_schema", "schema": json.loads(call.json_schema)}}
        # The newest models take none of these, so they are sent only where somebody chose them.
        if sampling.temperature != 1.0:
            extra["temperature"] = sampling.temperature
        if sampling.top_p < 1.0:
            extra["top_p"] = sampling.top_p
        if sampling.top_k > 0:
            extra["top_k"] = sampling.top_k
        if sampling.min_p > 0.0:
            extra["min_p"] = sampling.min_p
        if extra:
            body["extra_body"] = extra
        return body


class _Reply:
    """A reply as its events tell it."""

    def __init__(self, model: str) -> None:
        self._model = model
        self._prompt_tokens: int | None = None
        self._cached_tokens: int | None = None
        self._completion_tokens: int | None = None
        self._stop_reason: str | None = None
        self._stop_string: str | None = None
        self._call: tuple[str, list[str]] | None = None
        """Name and pieces of the arguments of the call that is being written."""

    def take(self, event: Any) -> UpstreamPiece:
        """``event``: a ``RawMessageStreamEvent``, not validated by the client."""
        match event.type:
            case "message_start":
                self._start(event.message)
            case "content_block_start" if event.content_block.type == "tool_use":
                self._call = str(event.content_block.name), []
            case "content_block_start" if event.content_block.type == "text":
                return UpstreamPiece(text=event.content_block.text)
            case "content_block_delta":
                return self._delta(event.delta)
            case "content_block_stop" if self._call is not None:
                (name, pieces), self._call = self._call, None
                return UpstreamPiece(calls=(ToolCall(name=name, arguments="".join(pieces) or "{}"),))
            case "message_delta":
                self._stop_reason = event.delta.stop_reason or self._stop_reason
                self._stop_string = event.delta.stop_sequence or self._stop_string
                self._completion_tokens = event.usage.output_tokens
        return UpstreamPiece()

    def finish(self) -> UpstreamFinish:
        """Raises EngineProtocolError where the reply is not whole."""
        if self._stop_reason is None:
            raise EngineProtocolError("the upstream's stream ended without a stop reason: the reply is not whole")
        usage = UpstreamUsage(
            model=self._model,
            finish=self._stop_reason,
            prompt_tokens=self._prompt_tokens,
            completion_tokens=self._completion_tokens,
            cached_tokens=self._cached_tokens,
        )
        return UpstreamFinish(_LENGTHS.get(self._stop_reason, "stop"), usage, self._stop_string)

    def _start(self, message: Any) -> None:
        usage = message.usage
        self._model = message.model or self._model
        self._cached_tokens = usage.cache_read_input_tokens
        # Anthropic counts what is read from a cache, or written to one, apart from the rest of the prompt.
        parts = (usage.input_tokens, usage.cache_read_input_tokens, usage.cache_creation_input_tokens)
        self._prompt_tokens = sum(part or 0 for part in parts)

    def _delta(self, delta: Any) -> UpstreamPiece:
        match delta.type:
            case "text_delta":
                return UpstreamPiece(text=delta.text)
            case "thinking_delta":
                return UpstreamPiece(reasoning=delta.thinking)
            case "input_json_delta" if self._call is not None:
                self._call[1].append(delta.partial_json)
                return UpstreamPiece(held=len(delta.partial_json))
        return UpstreamPiece()


def anthropic_messages(messages: tuple[Message, ...]) -> tuple[str, list[dict[str, Any]]]:
    """System text and conversation as Messages has them: system text behind the first message is the user's, the
    results of one reply's calls are one message, and no text is empty."""
    lead = list(takewhile(lambda message: message.role in ("system", "developer"), messages))
    system = "\n\n".join(message.content for message in lead if message.content)
    written: list[dict[str, Any]] = []
    for message in messages[len(lead) :]:
        role = "assistant" if message.role == "assistant" else "user"
        blocks = _blocks(message)
        if written and written[-1]["role"] == role:
            written[-1]["content"] += blocks
        elif blocks:
            written.append({"role": role, "content": blocks})
    return system, written


def _blocks(message: Message) -> list[dict[str, Any]]:
    if message.role == "tool":
        return [{"type": "tool_result", "tool_use_id": message.tool_call_id or "", "content": message.content}]
    blocks: list[dict[str, Any]] = []
    if message.content:
        blocks.append({"type": "text", "text": message.content})
    for call in message.tool_calls:
        arguments = _input(call.arguments)
        blocks.append({"type": "tool_use", "id": call.id or "", "name": call.name, "input": arguments})
    return blocks


def _input(arguments: str) -> dict[str, Any]:
    """The arguments of a call, which must be an object here; a reply that was cut has none that can be read."""
    try:
        value = json.loads(arguments)
    except ValueError:
        value = None
    return value if isinstance(value, dict) else {"arguments": arguments}


def _tool(function: Mapping[str, Any]) -> dict[str, Any]:
    tool = {"name": function["name"], "input_schema": function.get("parameters") or {"type": "object"}}
    if function.get("description"):
        tool["description"] = function["description"]
    return tool


def _error_of(error: anthropic.APIError) -> Exception:
    if isinstance(error, anthropic.APIStatusError):
        after = error.response.headers.get("retry-after", "")
        if error.status_code == 200:  # an error event within the stream
            return EngineProtocolError(f"the upstream broke the reply off: {error.message}")
        return refused(error.status_code, error.message, float(after) if after.isdecimal() else None)
    if isinstance(error, anthropic.APIConnectionError):
        return unreachable(error)
    return EngineProtocolError(f"the upstream's answer cannot be read: {error.message}")
