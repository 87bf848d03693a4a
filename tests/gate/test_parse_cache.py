"""Histories that come again are not parsed again, and nothing else changes."""

from __future__ import annotations

import json
from typing import Any

import pytest

from turnstile_server.errors import InvalidRequest
from turnstile_server.gate.dialects.base import BodyContext
from turnstile_server.gate.dialects.chat import parse_chat
from turnstile_server.gate.dialects.parse_cache import CONVERSATIONS, ParseCache


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def called(arguments: Any) -> dict[str, Any]:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
    return {"role": "assistant", "content": None, "tool_calls": [call]}


def body(*messages: dict[str, Any]) -> bytes:
    return json.dumps({"messages": messages}).encode()


def test_a_history_that_comes_again_gives_the_same_objects() -> None:
    before = ParseCache()
    first = parse_chat(body(user("a"), called("{}")), BodyContext(before))
    then = parse_chat(body(user("a"), called("{}"), user("b")), BodyContext(before))
    assert [ours is theirs for ours, theirs in zip(first.messages, then.messages, strict=False)] == [True, True]
    assert then == parse_chat(body(user("a"), called("{}"), user("b")))


@pytest.mark.parametrize(
    ("first", "then"),
    [
        ([user("a"), user("b")], [user("x"), user("b")]),
        ([user("a"), user("b")], [user("a")]),
        ([user("a")], [{"role": "system", "content": "a"}]),
        ([user("a"), called('{"n":1}')], [user("a"), called('{"n":1.0}')]),
        ([user("a"), called({"n": 1})], [user("a"), called({"n": 1.0})]),
        ([user("a"), called({"n": 1}), user("b")], [user("a"), called({"n": True}), user("b")]),
    ],
    ids=["edited", "cut", "role", "text of arguments", "number of another type", "true for one"],
)
def test_what_differs_is_parsed(first: list[dict[str, Any]], then: list[dict[str, Any]]) -> None:
    before = ParseCache()
    parse_chat(body(*first), BodyContext(before))
    assert parse_chat(body(*then), BodyContext(before)) == parse_chat(body(*then))


def test_a_refusal_is_the_same_with_a_known_history() -> None:
    before = ParseCache()
    parse_chat(body(user("a")), BodyContext(before))
    with pytest.raises(InvalidRequest, match=r"messages\[1\]\.role"):
        parse_chat(body(user("a"), {"role": "nobody"}), BodyContext(before))
    assert parse_chat(body(user("a")), BodyContext(before)) == parse_chat(body(user("a")))


def test_conversations_that_take_turns_are_all_remembered() -> None:
    before = ParseCache()
    opening = [[user(f"agent {index}")] for index in range(CONVERSATIONS)]
    firsts = [parse_chat(body(*messages), BodyContext(before)) for messages in opening]
    for first, messages in zip(firsts, opening, strict=True):
        assert parse_chat(body(*messages, user("more")), BodyContext(before)).messages[0] is first.messages[0]


def test_messages_too_deep_to_compare_are_parsed_again() -> None:
    deep = b'{"messages":[{"role":"user","content":"a","x":' + b'{"a":' * 1000 + b"1" + b"}" * 1000 + b"}]}"
    before = ParseCache()
    assert parse_chat(deep, BodyContext(before)) == parse_chat(deep, BodyContext(before))
