"""Limits hold for the whole body, however much of it is known; what is known is not read in a thread again."""

from __future__ import annotations

import json
import threading
from typing import Any

import anyio
import pytest

from bounded import bounded
from turnstile_server.errors import TurnstileError
from turnstile_server.gate import body as gate_body
from turnstile_server.gate.body import BodyParser
from turnstile_server.gate.dialects.anthropic import AnthropicDialect
from turnstile_server.gate.dialects.base import NO_CONTEXT, BodyContext, ModelRequest
from turnstile_server.gate.dialects.chat import ChatDialect
from turnstile_server.gate.dialects.parse_cache import ParseCache
from turnstile_server.settings import GateSettings

CONTEXT_LENGTH = 131_072


class NotedChat(ChatDialect):
    """Notes for each body whether it is read on the event loop."""

    def __init__(self) -> None:
        self.inline: list[bool] = []

    def parse(self, body: bytes, context: BodyContext = NO_CONTEXT) -> ModelRequest:
        self.inline.append(threading.current_thread() is threading.main_thread())
        return super().parse(body, context)


def chat_body(count: int) -> bytes:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": json.dumps([{"n": [1, 2]}] * 3)}}
    turn = [{"role": "assistant", "tool_calls": [call]}, {"role": "tool", "tool_call_id": "c", "content": "x, {["}]
    return json.dumps({"messages": [{"role": "user", "content": "go"}, *turn * count], "tools": []}).encode()


def anthropic_body(count: int) -> bytes:
    use = {"type": "tool_use", "id": "c", "name": "f", "input": {"a": [{"n": [1, 2]}] * 3}}
    result = {"type": "tool_result", "tool_use_id": "c", "content": "x, {["}
    turn = [{"role": "assistant", "content": [use]}, {"role": "user", "content": [result]}]
    messages = [{"role": "user", "content": "go"}, *turn * count]
    return json.dumps({"max_tokens": 9, "messages": messages}).encode()


@pytest.mark.parametrize(
    "limits",
    [
        {"max_messages": 12},
        {"max_body_values": 300},
        {"max_body_values": 300, "inline_body_bytes": 1 << 11},
        {"max_prompt_bytes": 1 << 12},
        {"max_body_values": 500, "inline_body_bytes": 0},
    ],
    ids=str,
)
@pytest.mark.parametrize("objects", [20, 5_000])
def test_a_known_history_is_refused_where_an_unknown_one_is(
    monkeypatch: pytest.MonkeyPatch, limits: dict[str, Any], objects: int
) -> None:
    monkeypatch.setattr(gate_body, "INLINE_OBJECTS", objects)
    parser = BodyParser(bounded(GateSettings, **limits), CONTEXT_LENGTH)

    async def outcome(dialect: Any, body: bytes, before: ParseCache | None) -> ModelRequest | str:
        try:
            return await parser.parse(dialect, body, before, {})
        except TurnstileError as refused:
            return refused.message

    async def grow() -> None:
        for dialect, written in ((ChatDialect(), chat_body), (AnthropicDialect(), anthropic_body)):
            before = ParseCache()
            outcomes = []
            for count in range(30):
                body = written(count)
                outcomes.append(await outcome(dialect, body, before))
                assert outcomes[-1] == await outcome(dialect, body, None), count
            assert isinstance(outcomes[0], ModelRequest)
            assert isinstance(outcomes[-1], str)

    anyio.run(grow)


@pytest.mark.parametrize("limit", ["bytes", "objects"])
def test_a_long_history_is_read_in_a_thread_once(monkeypatch: pytest.MonkeyPatch, limit: str) -> None:
    inline = 1 << 11
    if limit == "objects":
        monkeypatch.setattr(gate_body, "INLINE_OBJECTS", 20)
        inline = 1 << 20
    parser = BodyParser(bounded(GateSettings, inline_body_bytes=inline), CONTEXT_LENGTH)
    chat, before = NotedChat(), ParseCache()

    async def calls() -> list[ModelRequest]:
        return [await parser.parse(chat, chat_body(count), before, {}) for count in (20, 21, 22, 60)]

    requests = anyio.run(calls)
    assert chat.inline == [False, True, True, False]
    assert [len(request.messages) for request in requests] == [41, 43, 45, 121]
    assert before.continued == 2


def test_tools_are_read_once_for_all_episodes() -> None:
    parser = BodyParser(GateSettings(), CONTEXT_LENGTH)
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]

    async def offers() -> list[ModelRequest]:
        bodies = [{"messages": [{"role": "user", "content": text}], "tools": tools} for text in ("a", "b")]
        return [await parser.parse(ChatDialect(), json.dumps(body).encode(), ParseCache(), {}) for body in bodies]

    first, second = anyio.run(offers)
    assert first.tools is second.tools
    assert [tool.name for tool in first.tools] == ["f"]
