"""Chat Completions keeps the law of matching: a reply that the ``openai`` package read, streamed or not, and that
an agent sent back in any of the known ways, is still that reply."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import openai
import pytest
from body_server import BodyServer, body_server
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types.chat import ChatCompletionMessage

from capture.dialect_law import ASK, NEXT, assert_echo_law, envelope, replies, streamed, written
from products import examples
from turnstile.models import Message, ToolCall
from turnstile_server.capture.compare import carried
from turnstile_server.gate.dialects.chat import ChatDialect

CHAT = ChatDialect()
Wire = dict[str, Any]


class Reader:
    """The official client, reading bytes that the dialect wrote."""

    def __init__(self, server: BodyServer) -> None:
        self._server = server
        self._client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="key", max_retries=0)

    def close(self) -> None:
        self._client.close()

    def whole(self, body: bytes) -> ChatCompletionMessage:
        self._server.body = body
        call = self._client.chat.completions.create(model="policy", messages=[{"role": "user", "content": ASK}])
        return call.choices[0].message

    def accumulated(self, body: bytes) -> ChatCompletionMessage:
        """As the package's own accumulator puts a stream together."""
        self._server.body = body
        messages: Any = [{"role": "user", "content": ASK}]
        with self._client.chat.completions.stream(model="policy", messages=messages) as stream:
            return stream.get_final_completion().choices[0].message

    def summed_by_hand(self, body: bytes) -> Wire:
        """As most agents put a stream together: strings added up by call index."""
        self._server.body = body
        message: Wire = {"role": "assistant", "content": ""}
        calls: dict[int, Wire] = {}
        stream = self._client.chat.completions.create(
            model="policy", messages=[{"role": "user", "content": ASK}], stream=True
        )
        for chunk in stream:
            for choice in chunk.choices:
                delta = choice.delta
                message["content"] += delta.content or ""
                reasoning = (delta.model_extra or {}).get("reasoning_content")
                if reasoning:
                    message["reasoning_content"] = message.get("reasoning_content", "") + reasoning
                for part in delta.tool_calls or []:
                    assert part.function is not None
                    call = calls.setdefault(part.index, {"type": "function", "function": {"arguments": ""}})
                    if part.id:
                        call["id"] = part.id
                    if part.function.name:
                        call["function"]["name"] = part.function.name
                    call["function"]["arguments"] += part.function.arguments or ""
        if calls:
            message["tool_calls"] = [calls[index] for index in sorted(calls)]
        return message


@pytest.fixture(scope="module")
def reader() -> Iterator[Reader]:
    with body_server() as server:
        reader = Reader(server)
        yield reader
        reader.close()


def body(*echo: Wire) -> bytes:
    messages = [{"role": "user", "content": ASK}, *echo]
    if echo:
        messages.append({"role": "user", "content": NEXT})
    return json.dumps({"model": "policy", "messages": messages, "tools": envelope()}).encode()


def law(reply: Message, *echo: Wire) -> tuple[str, ...]:
    return assert_echo_law(CHAT, reply, first=body(), then=body(*echo))


# What agents do to a message between reading it and sending it back ---------------------------


def with_calls(message: Wire, change: Callable[[Wire], Wire]) -> Wire:
    if not message.get("tool_calls"):
        return message
    return {**message, "tool_calls": [change(call) for call in message["tool_calls"]]}


def without(message: Wire, *keys: str) -> Wire:
    return {key: value for key, value in message.items() if key not in keys}


def rewritten(call: Wire, rewrite: Callable[[str], Any]) -> Wire:
    return {**call, "function": {**call["function"], "arguments": rewrite(call["function"]["arguments"])}}


def compact(arguments: str) -> str:
    return json.dumps(json.loads(arguments), separators=(",", ":"))


def stripped(arguments: str) -> str:
    value = json.loads(arguments)
    for key, leaf in value.items():
        if isinstance(leaf, str):
            value[key] = "\n".join(line.rstrip() for line in leaf.split("\n"))
    return json.dumps(value)


def defaulted(call: Wire) -> Wire:
    if call["function"]["name"] != "run":
        return call
    return rewritten(call, lambda arguments: json.dumps({"timeout": 30, **json.loads(arguments)}))


def split(message: Wire) -> list[Wire]:
    text = without(message, "tool_calls")
    calls = message.get("tool_calls") or []
    return [text, *({"role": "assistant", "content": None, "tool_calls": [call]} for call in calls)]


HABITS: dict[str, Callable[[Wire], list[Wire]]] = {
    "null content": lambda m: [{**m, "content": m.get("content") or None}],
    "empty content": lambda m: [{**m, "content": m.get("content") or ""}],
    "no content": lambda m: [m if m.get("content") else without(m, "content")],
    "text parts": lambda m: [{**m, "content": [{"type": "text", "text": m.get("content") or ""}]}],
    "two text parts": lambda m: [
        {**m, "content": [{"type": "text", "text": part} for part in halves(m.get("content") or "")]}
    ],
    "cache hints": lambda m: [
        {
            **m,
            "content": [{"type": "text", "text": m.get("content") or "", "cache_control": {"type": "ephemeral"}}],
        }
    ],
    "trimmed": lambda m: [{**m, "content": (m.get("content") or "").strip()}],
    "nulls added": lambda m: [{**m, "function_call": None, "audio": None, "refusal": None, "annotations": None}],
    "unknown fields": lambda m: [{**m, "provider_specific_fields": {"x": 1}, "id": "msg_1", "index": 0}],
    "reasoning dropped": lambda m: [without(m, "reasoning_content")],
    "reasoning renamed": lambda m: [{**without(m, "reasoning_content"), "reasoning": m.get("reasoning_content")}],
    "no calls as null": lambda m: [{**m, "tool_calls": m.get("tool_calls") or None}],
    "no calls as empty": lambda m: [{**m, "tool_calls": m.get("tool_calls") or []}],
    "arguments compact": lambda m: [with_calls(m, lambda c: rewritten(c, compact))],
    "arguments as object": lambda m: [with_calls(m, lambda c: rewritten(c, carried))],
    "arguments stripped": lambda m: [with_calls(m, lambda c: rewritten(c, stripped))],
    "defaults filled": lambda m: [with_calls(m, defaulted)],
    "ids renamed": lambda m: [with_calls(m, lambda c: {**c, "id": f"other_{c['id']}"})],
    "ids dropped": lambda m: [with_calls(m, lambda c: without(c, "id"))],
    "index kept": lambda m: [with_calls(m, lambda c: {**c, "index": 0})],
    "split": split,
}


def halves(text: str) -> tuple[str, str]:
    return text[: len(text) // 2], text[len(text) // 2 :]


DUMPS: dict[str, Callable[[ChatCompletionMessage], Wire]] = {
    "model_dump": lambda m: m.model_dump(),
    "without None": lambda m: m.model_dump(exclude_none=True),
    "without unset": lambda m: m.model_dump(exclude_unset=True),
    "to_dict": lambda m: m.to_dict(),
    "json": lambda m: json.loads(m.model_dump_json()),
}


# The law ----------------------------------------------------


@given(reply=replies(), dump=st.sampled_from(sorted(DUMPS)))
def test_an_unstreamed_reply_comes_back_as_itself(reader: Reader, reply: Message, dump: str) -> None:
    assert law(reply, DUMPS[dump](reader.whole(written(CHAT, reply)))) == ()


@given(reply=replies(), dump=st.sampled_from(sorted(DUMPS)), piece=st.integers(1, 5), keepalives=st.booleans())
def test_a_streamed_reply_put_together_by_the_package_comes_back_as_itself(
    reader: Reader, reply: Message, dump: str, piece: int, keepalives: bool
) -> None:
    message = reader.accumulated(streamed(CHAT, reply, piece, keepalives=keepalives))
    assert law(reply, sent(DUMPS[dump](message))) == ()


@given(reply=replies(), piece=st.integers(1, 5))
def test_a_streamed_reply_put_together_by_hand_comes_back_as_itself(
    reader: Reader, reply: Message, piece: int
) -> None:
    assert law(reply, reader.summed_by_hand(streamed(CHAT, reply, piece))) == ()


@pytest.mark.slow
@given(reply=replies(), piece=st.integers(1, 5))
def test_streamed_and_unstreamed_replies_are_the_same_message(reader: Reader, reply: Message, piece: int) -> None:
    whole = CHAT.parse(body(reader.whole(written(CHAT, reply)).model_dump()))
    summed = CHAT.parse(body(reader.summed_by_hand(streamed(CHAT, reply, piece))))
    assert whole.messages == summed.messages


@pytest.mark.parametrize("habit", sorted(HABITS))
@settings(max_examples=examples(25))
@given(reply=replies(), stream=st.booleans())
def test_a_reply_survives_the_habits_of_agents(reader: Reader, habit: str, reply: Message, stream: bool) -> None:
    message = (
        reader.summed_by_hand(streamed(CHAT, reply, 3))
        if stream
        else reader.whole(written(CHAT, reply)).model_dump()
    )
    law(reply, *HABITS[habit](message))


def sent(message: Wire) -> Wire:
    """The accumulator adds its own parse of the arguments; agents leave that out of what they send."""
    message = without(message, "parsed")
    return with_calls(message, lambda c: {**c, "function": without(c["function"], "parsed_arguments")})


CALL = Message("assistant", "text", reasoning="why", tool_calls=(ToolCall("run", '{"code": "x"}', "call_0"),))
EDITS: dict[str, Wire] = {
    "text": {"content": "other"},
    "no text": {"content": None},
    "call dropped": {"tool_calls": None},
    "call renamed": {"tool_calls": [{"id": "call_0", "type": "function", "function": {"name": "invalid"}}]},
    "argument": {
        "tool_calls": [
            {"id": "call_0", "type": "function", "function": {"name": "run", "arguments": '{"code": "y"}'}}
        ]
    },
}


@pytest.mark.parametrize("edit", sorted(EDITS))
def test_the_law_tells_a_real_edit(reader: Reader, edit: str) -> None:
    """The property above can fail: it does for every one of these."""
    message = reader.whole(written(CHAT, CALL)).model_dump()
    assert law(CALL, message) == ()
    with pytest.raises(AssertionError):
        law(CALL, {**message, **EDITS[edit]})
