"""A hosted model behind OpenAI's Chat Completions, by OpenAI's own client.

https://platform.openai.com/docs/api-reference/chat. Served so by OpenAI, vLLM, SGLang and most hosts of open
models. Replies are always streamed: one way for all callers, and a caller that goes away ends the call.
"""

from __future__ import annotations

import json
import re
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing
from typing import Any, Final, Literal

import httpx2
import openai
from openai.types.chat import ChatCompletionChunk

from turnstile.models import Message, ToolCall, UpstreamUsage
from turnstile_server.engines.upstream.failures import refused, unreachable
from turnstile_server.engines.upstream.protocol import UpstreamCall, UpstreamFinish, UpstreamModel, UpstreamPiece
from turnstile_server.errors import EngineProtocolError, EngineRefused

_UNKNOWN: Final = re.compile(
    r"unrecognized|unknown|unexpected|unsupported|not supported|not permitted", re.IGNORECASE
)
"""How servers say that they do not know a parameter, and not that its value is wrong."""

_RENAMES: Final[Mapping[str, str | None]] = {"max_completion_tokens": "max_tokens", "stream_options": None}
"""Parameters that some servers do not know, and what they have instead."""

_FINISHES: Final[Mapping[str, Literal["stop", "length"]]] = {"length": "length"}
_REASONING: Final = ("reasoning_content", "reasoning")
"""The fields in which servers of reasoning models write it; OpenAI writes none."""


class ChatUpstream(UpstreamModel):
    """``client``: with the server's address and key; this object closes it."""

    format = "Chat Completions"

    def __init__(self, client: openai.AsyncOpenAI, model: str, context_length: int | None = None) -> None:
        self._client = client
        self._model = model
        self._context_length = context_length
        self._unknown: set[str] = set()
        """Parameters that the server was found not to know."""
        self._reasoning_field: str | None = None
        """The field of its reasoning, once there was some: it is given back in it."""

    @property
    def context_length(self) -> int | None:
        return self._context_length

    async def count(self, call: UpstreamCall) -> int:
        raise EngineRefused("the upstream counts no tokens ahead of a call: Chat Completions has no way to ask")

    async def close(self) -> None:
        await self._client.close()

    async def answer(self, call: UpstreamCall) -> AsyncGenerator[UpstreamPiece]:
        try:
            chunks = await self._created(call)
            async with aclosing(self._pieces(chunks)) as pieces:
                async for piece in pieces:
                    yield piece
        except openai.APIStatusError as error:
            raise _of_status(error) from error
        except (openai.APIConnectionError, httpx2.HTTPError) as error:
            raise unreachable(error) from error
        except openai.APIError as error:  # an error event within the stream
            raise EngineProtocolError(f"the upstream broke the reply off: {error.message}") from error
        except (AttributeError, TypeError, ValueError, IndexError) as error:
            raise EngineProtocolError(f"the upstream's stream is not one of Chat Completions: {error}") from error

    async def _created(self, call: UpstreamCall) -> openai.AsyncStream[ChatCompletionChunk]:
        """The stream of the reply; a parameter that the server does not know is replaced, once and for all."""
        client = self._client if call.tried_again else self._client.with_options(max_retries=0)
        while True:
            body = self._body(call)
            try:
                messages = body.pop("messages")
                return await client.chat.completions.create(
                    model=self._model, messages=messages, stream=True, extra_body=body
                )
            except openai.APIStatusError as error:
                unknown = {name for name in _RENAMES if name in body and name in error.message}
                refused_as_unknown = error.status_code in (400, 422) and _UNKNOWN.search(error.message)
                if not refused_as_unknown or not unknown - self._unknown:
                    raise
                self._unknown |= unknown

    def _body(self, call: UpstreamCall) -> dict[str, Any]:
        sampling = call.sampling
        body: dict[str, Any] = {
            "messages": chat_messages(call.messages, self._reasoning_field),
            "max_completion_tokens": call.max_tokens,
            "stream_options": {"include_usage": True},
        }
        # What is neutral is left to the server: some models take no other value, or refuse the parameter.
        if sampling.temperature != 1.0:
            body["temperature"] = sampling.temperature
        if sampling.top_p < 1.0:
            body["top_p"] = sampling.top_p
        if sampling.top_k > 0:
            body["top_k"] = sampling.top_k
        if sampling.min_p > 0.0:
            body["min_p"] = sampling.min_p
        if call.stop:
            body["stop"] = list(call.stop)
        if call.tools:
            body["tools"] = [tool.spec for tool in call.tools]
            if not call.may_call:
                body["tool_choice"] = "none"
            elif call.forced_call is not None:
                named = {"type": "function", "function": {"name": call.forced_call}}
                body["tool_choice"] = named if call.forced_call else "required"
        if call.json_schema is not None:
            schema = {"name": "answer", "schema": json.loads(call.json_schema)}
            body["response_format"] = {"type": "json_schema", "json_schema": schema}
        for name in self._unknown:
            value, other = body.pop(name, None), _RENAMES[name]
            if other is not None:
                body[other] = value
        return body

    async def _pieces(self, chunks: AsyncIterator[ChatCompletionChunk]) -> AsyncGenerator[UpstreamPiece]:
        calls = _OpenCalls()
        finish: str | None = None
        usage, model = None, self._model
        async for chunk in chunks:
            model = chunk.model or model
            usage = chunk.usage or usage
            for choice in chunk.choices or ():
                finish = choice.finish_reason or finish
                yield self._piece(choice.delta, calls)
        if finish is None:
            raise EngineProtocolError("the upstream's stream ended without a finish reason")
        yield UpstreamPiece(calls=calls.whole())
        details = None if usage is None else usage.prompt_tokens_details
        counted = UpstreamUsage(
            model=model,
            finish=finish,
            prompt_tokens=None if usage is None else usage.prompt_tokens,
            completion_tokens=None if usage is None else usage.completion_tokens,
            cached_tokens=None if details is None else details.cached_tokens,
        )
        yield UpstreamPiece(finish=UpstreamFinish(_FINISHES.get(finish, "stop"), counted))

    def _piece(self, delta: Any, calls: _OpenCalls) -> UpstreamPiece:
        """``delta``: a ``ChoiceDelta``, not validated by the client."""
        if delta is None:
            return UpstreamPiece()
        held = calls.add(delta.tool_calls or ())
        extra: Mapping[str, Any] = delta.model_extra or {}
        reasoning = ""
        for name in _REASONING:
            if extra.get(name):
                reasoning, self._reasoning_field = _text(extra[name]), name
                break
        text = _text(delta.content) + _text(delta.refusal)
        return UpstreamPiece(text, reasoning, held=held)


class _OpenCalls:
    """The tool calls of a reply, whose arguments come in pieces."""

    def __init__(self) -> None:
        self._names: dict[int, str] = {}
        self._arguments: dict[int, list[str]] = {}

    def add(self, deltas: Any) -> int:
        """Returns how many characters came."""
        came = 0
        for delta in deltas:
            index, function = int(delta.index), delta.function
            pieces = self._arguments.setdefault(index, [])
            if function is not None:
                self._names[index] = self._names.get(index, "") or _text(function.name)
                pieces.append(_text(function.arguments))
                came += len(pieces[-1]) + len(_text(function.name))
        return came

    def whole(self) -> tuple[ToolCall, ...]:
        return tuple(
            ToolCall(name=self._names.get(index, ""), arguments="".join(self._arguments[index]) or "{}")
            for index in sorted(self._arguments)
        )


def chat_messages(messages: tuple[Message, ...], reasoning_field: str | None) -> list[dict[str, Any]]:
    """The conversation as Chat Completions has it. ``reasoning_field``: the server's own field of reasoning, which
    is given back within the last round of tool calls: hosts that want it at all want it there."""
    last_user = max((index for index, message in enumerate(messages) if message.role == "user"), default=-1)
    written = []
    for index, message in enumerate(messages):
        item: dict[str, Any] = {"role": message.role, "content": message.content}
        if message.role == "developer":  # only OpenAI knows the role, and takes the other for it
            item["role"] = "system"
        if message.name is not None:
            item["name"] = message.name
        if message.role == "tool":
            item["tool_call_id"] = message.tool_call_id or ""
        if message.tool_calls:
            item["content"] = message.content or None
            item["tool_calls"] = [_call(call) for call in message.tool_calls]
        if reasoning_field is not None and message.reasoning and index > last_user:
            item[reasoning_field] = message.reasoning
        written.append(item)
    return written


def _call(call: ToolCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.id or "", "type": "function", "function": function}


def _of_status(error: openai.APIStatusError) -> Exception:
    after = error.response.headers.get("retry-after", "")
    said = error.message if error.code is None else f"{error.code}: {error.message}"
    return refused(error.status_code, said, float(after) if after.isdecimal() else None)


def _text(value: Any) -> str:
    """Raises TypeError for what is neither a string nor nothing."""
    if value is None:
        return ""
    if not isinstance(value, str):
        raise TypeError(f"{type(value).__name__} where a text should be")
    return value
