"""The law of matching over whole dialogues: conversations side by side in one episode, each written by a dialect,
sent back with an agent's habits and read again, continue their own last turn at every call."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from capture.dialect_law import CALL, TOOLS, replies, written
from capture.turns import make_turn
from products import examples
from turnstile.models import Message
from turnstile_server.capture import Node, TokenTree
from turnstile_server.capture.keys import tools_key
from turnstile_server.gate.dialects.anthropic import AnthropicDialect
from turnstile_server.gate.dialects.base import BodyContext, Dialect
from turnstile_server.gate.dialects.gemini import GeminiDialect
from turnstile_server.gate.dialects.parse_cache import ParseCache
from turnstile_server.gate.dialects.responses import ResponsesDialect

Wire = dict[str, Any]
SYSTEM = "You are careful."


@dataclass(frozen=True)
class Wiring:
    """What a client of one dialect writes. ``habits`` change a reply's items between reading and sending."""

    dialect: Dialect
    body: Callable[[list[Wire]], Wire]
    user: Callable[[str], Wire]
    results: Callable[[Message, list[str]], list[Wire]]
    items: Callable[[Wire], list[Wire]]
    habits: tuple[Callable[[list[Wire]], list[Wire]], ...]


@dataclass
class Conversation:
    history: list[Wire] = field(default_factory=list)
    told: list[str] = field(default_factory=list)
    """Contents since the last turn: what must be new to the tree."""
    last: Node | None = None
    started: bool = False


def blocks(change: Callable[[Wire], list[Wire]], key: str) -> Callable[[list[Wire]], list[Wire]]:
    """``change`` of every block in a message's list."""
    return lambda items: [{**one, key: [new for block in one[key] for new in change(block)]} for one in items]


def without(*keys: str) -> Callable[[Wire], list[Wire]]:
    return lambda block: [{key: value for key, value in block.items() if key not in keys}]


ANTHROPIC = Wiring(
    dialect=AnthropicDialect(),
    body=lambda history: {
        "model": "m",
        "max_tokens": 9,
        "system": SYSTEM,
        "messages": history,
        "tools": [{"name": tool.name, "input_schema": tool.parameters} for tool in TOOLS],
    },
    user=lambda text: {"role": "user", "content": text},
    results=lambda reply, texts: [
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": call.id, "content": text}
                for call, text in zip(reply.tool_calls, texts, strict=True)
            ],
        }
    ],
    items=lambda said: [{"role": "assistant", "content": said["content"]}],
    habits=(
        lambda items: items,
        blocks(lambda block: [] if block["type"] == "thinking" else [block], "content"),
        blocks(lambda block: [{**block, "cache_control": {"type": "ephemeral"}}], "content"),
        lambda items: [{**one, "content": [block]} for one in items for block in one["content"]],
    ),
)

RESPONSES = Wiring(
    dialect=ResponsesDialect(),
    body=lambda history: {
        "model": "m",
        "instructions": SYSTEM,
        "input": history,
        "tools": [{"type": "function", "name": tool.name, "parameters": tool.parameters} for tool in TOOLS],
    },
    user=lambda text: {"role": "user", "content": [{"type": "input_text", "text": text}]},
    results=lambda reply, texts: [
        {"type": "function_call_output", "call_id": call.id, "output": text}
        for call, text in zip(reply.tool_calls, texts, strict=True)
    ],
    items=lambda said: list(said["output"]),
    habits=(
        lambda items: items,
        lambda items: [new for item in items for new in without("id", "status")(item)],
        lambda items: [item for item in items if item["type"] != "reasoning"],
        lambda items: [
            {**item, "arguments": json.dumps(json.loads(item["arguments"]))} if "arguments" in item else item
            for item in items
        ],
    ),
)

GEMINI = Wiring(
    dialect=GeminiDialect(),
    body=lambda history: {
        "systemInstruction": {"parts": [{"text": SYSTEM}]},
        "contents": history,
        "tools": [
            {"functionDeclarations": [{"name": tool.name, "parametersJsonSchema": tool.parameters}]}
            for tool in TOOLS
        ],
    },
    user=lambda text: {"role": "user", "parts": [{"text": text}]},
    results=lambda reply, texts: [
        {
            "role": "user",
            "parts": [
                {"functionResponse": {"name": call.name, "response": {"output": text}}}
                for call, text in zip(reply.tool_calls, texts, strict=True)
            ],
        }
    ],
    items=lambda said: [said["candidates"][0]["content"]],
    habits=(
        lambda items: items,
        blocks(without("thoughtSignature"), "parts"),
        blocks(lambda part: [] if part.get("thought") else [part], "parts"),
        lambda items: [{**one, "parts": [part]} for one in items for part in one["parts"]],
    ),
)


@pytest.mark.parametrize("wiring", [ANTHROPIC, RESPONSES, GEMINI], ids=lambda wiring: wiring.dialect.name)
@settings(max_examples=examples(40))
@given(data=st.data())
def test_every_call_of_a_dialogue_continues_the_turn_before_it(wiring: Wiring, data: st.DataObject) -> None:
    tree, before = TokenTree(), ParseCache()
    conversations = [Conversation() for _ in range(data.draw(st.integers(1, 3)))]
    for seq in range(data.draw(st.integers(1, 8))):
        number = data.draw(st.integers(0, len(conversations) - 1))
        ours = conversations[number]
        asked = f"question {seq} to {number}"
        ours.history.append(wiring.user(asked))
        ours.told.append(asked)
        call = wiring.dialect.parse(json.dumps(wiring.body(ours.history)).encode(), BodyContext(before))
        offer = tools_key(call.tools, "template")
        match = tree.match(call.messages, call.tools, offer)
        assert match.parent is ours.last
        assert [message.content for message in match.new_messages] == [
            *([] if ours.started else [SYSTEM]),
            *ours.told,
        ]
        reply = data.draw(replies())
        cut = data.draw(st.integers(0, 4)) == 0 and bool(reply.content.strip())
        if cut:  # what the caller saw of a stream that broke off, and kept
            reply = Message("assistant", reply.content, reasoning=reply.reasoning)
        turn = make_turn(
            match,
            reply,
            seq=seq,
            tools_key=offer,
            completion_ids=[1],
            finish_reason="abort" if cut else "stop",
        )
        ours.last, ours.started = tree.add(turn), True
        said = json.loads(written(wiring.dialect, reply, CALL))
        habit = data.draw(st.sampled_from(wiring.habits))
        ours.history += habit(wiring.items(said))
        ours.told = [f"result {index} of {seq}" for index in range(len(reply.tool_calls))]
        if ours.told:
            ours.history += wiring.results(reply, ours.told)
