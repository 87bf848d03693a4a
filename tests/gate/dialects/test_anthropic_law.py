"""Anthropic Messages keeps the law of matching: a reply that the ``anthropic`` package read, streamed or not, and
that an agent sent back in any of the known ways, is still that reply."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import anthropic
import pytest
from anthropic.types import Message as AnthropicMessage
from body_server import BodyServer, body_server
from hypothesis import given, settings
from hypothesis import strategies as st

from capture.dialect_law import ASK, CALL, NEXT, TOOLS, assert_echo_law, replies, streamed, written
from products import examples
from turnstile.models import Message, ToolCall
from turnstile_server.gate.dialects.anthropic import AnthropicDialect

ANTHROPIC = AnthropicDialect()
HIDDEN = replace(CALL, show_reasoning=False)
Wire = dict[str, Any]
Blocks = list[Wire]
ASKED: Any = {"model": "policy", "max_tokens": 9, "messages": [{"role": "user", "content": ASK}]}
SAME = ({"arguments_reserialised"}, set[str]())
"""The cosmetic differences of an honest echo: the wire carries objects, so the spelling of arguments is lost."""


class Reader:
    """The official client, reading bytes that the dialect wrote."""

    def __init__(self, server: BodyServer) -> None:
        self._server = server
        self._client = anthropic.Anthropic(base_url=server.url, api_key="key", max_retries=0)

    def close(self) -> None:
        self._client.close()

    def whole(self, body: bytes) -> AnthropicMessage:
        self._server.body = body
        message: AnthropicMessage = self._client.messages.create(**ASKED)
        return message

    def accumulated(self, body: bytes) -> AnthropicMessage:
        """As the package's own accumulator puts a stream together."""
        self._server.body = body
        with self._client.messages.stream(**ASKED) as stream:
            return stream.get_final_message()

    def summed_by_hand(self, body: bytes) -> Blocks:
        """As most agents put a stream together: pieces added up by block index, input parsed when it ends."""
        self._server.body = body
        blocks: dict[int, Wire] = {}
        inputs: dict[int, str] = {}
        for event in self._client.messages.create(**ASKED, stream=True):
            match event.type:
                case "content_block_start":
                    assert event.index == len(blocks)
                    blocks[event.index] = event.content_block.to_dict()
                case "content_block_delta":
                    block, delta = blocks[event.index], event.delta
                    match delta.type:
                        case "text_delta":
                            block["text"] += delta.text
                        case "thinking_delta":
                            block["thinking"] += delta.thinking
                        case "signature_delta":
                            block["signature"] += delta.signature
                        case "input_json_delta":
                            inputs[event.index] = inputs.get(event.index, "") + delta.partial_json
                case "content_block_stop" if event.index in inputs:
                    blocks[event.index]["input"] = json.loads(inputs[event.index] or "{}")
        return [blocks[index] for index in sorted(blocks)]


@pytest.fixture(scope="module")
def reader() -> Iterator[Reader]:
    with body_server() as server:
        reader = Reader(server)
        yield reader
        reader.close()


def body(*echo: Wire) -> bytes:
    messages = [{"role": "user", "content": ASK}, *echo]
    if echo:
        messages.append({"role": "user", "content": [{"type": "text", "text": NEXT}]})
    tools = [{"name": tool.name, "input_schema": tool.parameters} for tool in TOOLS]
    return json.dumps({"model": "policy", "max_tokens": 9, "messages": messages, "tools": tools}).encode()


def law(reply: Message, *echo: Wire) -> set[str]:
    return set(assert_echo_law(ANTHROPIC, reply, first=body(), then=body(*echo)))


def said(content: Any) -> Wire:
    return {"role": "assistant", "content": content}


# What agents do to the blocks of a reply between reading them and sending them back -----------------


def changed(blocks: Blocks, kind: str, change: Callable[[Wire], Wire]) -> Blocks:
    return [change(block) if block["type"] == kind else block for block in blocks]


def without(blocks: Blocks, *kinds: str) -> Blocks:
    return [block for block in blocks if block["type"] not in kinds]


def rewritten(blocks: Blocks, rewrite: Callable[[Wire, Wire], Any]) -> Blocks:
    return changed(blocks, "tool_use", lambda block: {**block, "input": rewrite(block, block["input"])})


def stripped(_: Wire, value: Wire) -> Wire:
    return {
        key: "\n".join(line.rstrip() for line in leaf.split("\n")) if isinstance(leaf, str) else leaf
        for key, leaf in value.items()
    }


def defaulted(block: Wire, value: Wire) -> Wire:
    return {"timeout": 30, **value} if block["name"] == "run" else {"options": {}, **value}


def halved(block: Wire) -> Blocks:
    if block["type"] != "text":
        return [block]
    middle = len(block["text"]) // 2
    return [{**block, "text": block["text"][:middle]}, {**block, "text": block["text"][middle:]}]


def as_string(blocks: Blocks) -> Any:
    """Claude Code: once the cache marker has left a message of one text block."""
    return blocks[0]["text"] if [block["type"] for block in blocks] == ["text"] else blocks


def texts_of(blocks: Blocks) -> str:
    return "".join(block["text"] for block in blocks if block["type"] == "text")


def without_signature(block: Wire) -> Wire:
    return {key: value for key, value in block.items() if key != "signature"}


CACHE = {"type": "ephemeral", "ttl": "1h"}
HABITS: dict[str, Callable[[Blocks], list[Wire]]] = {
    "cache marker on the last block": lambda b: [said([*b[:-1], {**b[-1], "cache_control": CACHE}])],
    "list to string": lambda b: [said(as_string(b))],
    "text apart, as string": lambda b: [said(texts_of(b)), said(without(b, "text"))],
    "thinking dropped": lambda b: [said(without(b, "thinking"))],
    "signature altered": lambda b: [said(changed(b, "thinking", lambda t: {**t, "signature": "other"}))],
    "signature dropped": lambda b: [said(changed(b, "thinking", without_signature))],
    "thinking redacted": lambda b: [
        said(changed(b, "thinking", lambda _: {"type": "redacted_thinking", "data": "x"}))
    ],
    "thinking last": lambda b: [said(sorted(b, key=lambda block: block["type"] == "thinking"))],
    "empty and blank text dropped": lambda b: [
        said([block for block in b if block["type"] != "text" or block["text"].strip()])
    ],
    "trimmed": lambda b: [said(changed(b, "text", lambda t: {**t, "text": t["text"].strip()}))],
    "two text blocks": lambda b: [said([half for block in b for half in halved(block)])],
    "nulls added": lambda b: [said([{**block, "citations": None, "caller": None} for block in b])],
    "unknown fields": lambda b: [{**said(b), "id": "msg_1", "output_config": {"effort": "low"}}],
    "ids renamed": lambda b: [said(changed(b, "tool_use", lambda t: {**t, "id": f"toolu_{t['id']}"}))],
    "keys in another order": lambda b: [said(rewritten(b, lambda _, v: dict(reversed(v.items()))))],
    "defaults filled": lambda b: [said(rewritten(b, defaulted))],
    "code stripped": lambda b: [said(rewritten(b, stripped))],
    "defaults filled and code stripped": lambda b: [said(rewritten(rewritten(b, defaulted), stripped))],
    "one message for each block": lambda b: [said([block]) for block in b],
}

DUMPS: dict[str, Callable[[AnthropicMessage], Any]] = {
    "the objects themselves": lambda m: m.to_param()["content"],
    "model_dump": lambda m: m.model_dump()["content"],
    "without None": lambda m: m.model_dump(exclude_none=True)["content"],
    "to_dict": lambda m: m.to_dict()["content"],
    "json": lambda m: json.loads(m.model_dump_json())["content"],
}


def dumped(message: AnthropicMessage, dump: str) -> Blocks:
    """As the package would write it into a request's body."""
    content: Blocks = json.loads(json.dumps(DUMPS[dump](message), default=lambda model: model.to_dict()))
    for block in content:
        block.pop("parsed_output", None)  # the accumulator's own; the API refuses it, so agents leave it out
    return content


# The law ----------------------------------------------------


@given(reply=replies(), dump=st.sampled_from(sorted(DUMPS)))
def test_an_unstreamed_message_comes_back_as_itself(reader: Reader, reply: Message, dump: str) -> None:
    assert law(reply, said(dumped(reader.whole(written(ANTHROPIC, reply)), dump))) in SAME


@pytest.mark.slow
@given(reply=replies(), dump=st.sampled_from(sorted(DUMPS)), piece=st.integers(1, 5), keepalives=st.booleans())
def test_a_streamed_message_put_together_by_the_package_comes_back_as_itself(
    reader: Reader, reply: Message, dump: str, piece: int, keepalives: bool
) -> None:
    message = reader.accumulated(streamed(ANTHROPIC, reply, piece, keepalives=keepalives))
    assert law(reply, said(dumped(message, dump))) in SAME


@pytest.mark.slow
@given(reply=replies(), piece=st.integers(1, 5), keepalives=st.booleans())
def test_a_streamed_message_put_together_by_hand_is_the_unstreamed_one(
    reader: Reader, reply: Message, piece: int, keepalives: bool
) -> None:
    blocks = reader.summed_by_hand(streamed(ANTHROPIC, reply, piece, keepalives=keepalives))
    assert blocks == reader.whole(written(ANTHROPIC, reply)).to_dict()["content"]
    assert law(reply, said(blocks)) in SAME


@pytest.mark.slow
@given(reply=replies(), stream=st.booleans())
def test_a_client_that_did_not_ask_for_thinking_gets_none_and_keeps_the_law(
    reader: Reader, reply: Message, stream: bool
) -> None:
    message = (
        reader.accumulated(streamed(ANTHROPIC, reply, 3, call=HIDDEN))
        if stream
        else reader.whole(written(ANTHROPIC, reply, HIDDEN))
    )
    assert all(block.type != "thinking" for block in message.content)
    assert law(reply, said(dumped(message, "json"))) <= {"arguments_reserialised", "reasoning_dropped"}


@pytest.mark.parametrize("habit", sorted(HABITS))
@settings(max_examples=examples(15))
@given(reply=replies(), stream=st.booleans())
def test_a_message_survives_the_habits_of_agents(reader: Reader, habit: str, reply: Message, stream: bool) -> None:
    blocks = (
        reader.summed_by_hand(streamed(ANTHROPIC, reply, 3))
        if stream
        else dumped(reader.whole(written(ANTHROPIC, reply)), "json")
    )
    law(reply, *HABITS[habit](blocks))


COMPACT = Message("assistant", "text", reasoning="why", tool_calls=(ToolCall("run", '{"code":"x"}', "call_0"),))
USE = {"type": "tool_use", "id": "call_0", "name": "run", "input": {"code": "x"}}
EDITS: dict[str, Callable[[Blocks], Blocks]] = {
    "text": lambda b: changed(b, "text", lambda t: {**t, "text": "other"}),
    "no text": lambda b: without(b, "text"),
    "call dropped": lambda b: without(b, "tool_use"),
    "call added": lambda b: [*b, USE],
    "call renamed": lambda b: changed(b, "tool_use", lambda t: {**t, "name": "invalid"}),
    "argument": lambda b: rewritten(b, lambda *_: {"code": "y"}),
    "malformed, as Claude Code says": lambda b: rewritten(b, lambda *_: {"__unparsedToolInput": {"raw": "x"}}),
}


@pytest.mark.parametrize("edit", sorted(EDITS))
def test_the_law_tells_a_real_edit_of_blocks(reader: Reader, edit: str) -> None:
    """The property above can fail: it does for every one of these."""
    blocks = dumped(reader.whole(written(ANTHROPIC, COMPACT)), "json")
    assert law(COMPACT, said(blocks)) == set()
    with pytest.raises(AssertionError):
        law(COMPACT, said(EDITS[edit](blocks)))
