"""Retries: what identifies a call, and every cell of the table."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from capture.play import Play, says
from turnstile.models import Message, Tool, ToolCall
from turnstile_server.capture import Action, EarlierCall, decide
from turnstile_server.capture.keys import request_key, tools_key
from turnstile_server.errors import InvalidRequest

TABLE = [
    (EarlierCall.NONE, Action.GENERATE, Action.GENERATE),
    (EarlierCall.IN_FLIGHT, Action.JOIN, Action.GENERATE),
    (EarlierCall.IN_FLIGHT_GONE, Action.REPLACE, Action.REPLACE),
    (EarlierCall.UNDELIVERED, Action.REPLAY, Action.REPLAY),
    (EarlierCall.WRITTEN, Action.REPLAY, Action.GENERATE),
]


@pytest.mark.parametrize(("earlier", "marked", "unmarked"), TABLE, ids=[row[0].name for row in TABLE])
def test_the_retry_table(earlier: EarlierCall, marked: Action, unmarked: Action) -> None:
    assert decide(earlier, marked=True) is marked
    assert decide(earlier, marked=False) is unmarked


def test_the_table_has_a_row_for_every_state() -> None:
    assert {row[0] for row in TABLE} == set(EarlierCall)


CALL = [Message("user", "u"), Message("assistant", "a", reasoning="r", tool_calls=(ToolCall("f", "{}", "c1"),))]


def key(parent: str | None = "p", messages: list[Message] | None = None, tools: str = "t", **asked: Any) -> str:
    return request_key(parent, CALL if messages is None else messages, tools, asked)


def test_the_order_of_sampling_options_is_nothing() -> None:
    assert request_key("p", CALL, "t", {"a": 1, "b": 2}) == request_key("p", CALL, "t", {"b": 2, "a": 1})


def test_renamed_ids_are_the_same_request() -> None:
    renamed = replace(CALL[1], tool_calls=(ToolCall("f", "{}", "c2"),), tool_call_id="x")
    assert key(messages=[CALL[0], renamed]) == key()


OTHERS = {
    "parent": key(parent="q"),
    "no parent": key(parent=None),
    "tools": key(tools="t2"),
    "sampling": key(temperature=0.1),
    "sampling, other value": key(temperature=0.2),
    "sampling, true for 1": key(temperature=True),
    "sampling, 1": key(temperature=1),
    "text": key(messages=[Message("user", "u "), CALL[1]]),
    "role": key(messages=[Message("system", "u"), CALL[1]]),
    "name": key(messages=[Message("user", "u", name="n"), CALL[1]]),
    "reasoning": key(messages=[CALL[0], replace(CALL[1], reasoning=None)]),
    "call": key(messages=[CALL[0], replace(CALL[1], tool_calls=())]),
    "arguments": key(messages=[CALL[0], replace(CALL[1], tool_calls=(ToolCall("f", "{ }"),))]),
    "fewer": key(messages=CALL[:1]),
    "reordered": key(messages=CALL[::-1]),
    "none": key(messages=[]),
    "run together": key(messages=[Message("user", "uassistanta"), *CALL[2:]]),
}


def test_whatever_changes_what_is_asked_is_another_request() -> None:
    keys = [key(), *OTHERS.values()]
    assert len(set(keys)) == len(keys)


def test_texts_do_not_run_into_each_other() -> None:
    pairs = [("ab", "c"), ("a", "bc"), ("abc", ""), ("", "abc")]
    keys = {key(messages=[Message("user", first), Message("user", second)]) for first, second in pairs}
    keys |= {key(messages=[Message("user", first, name=second)]) for first, second in pairs}
    keys |= {key(parent=first, tools=second) for first, second in pairs}
    assert len(keys) == 12


@pytest.mark.slow
@pytest.mark.parametrize("depth", [2_000, 100_000])
def test_options_and_tools_nested_beyond_the_stack_are_refused(depth: int) -> None:
    nested: dict[str, Any] = {}
    for _ in range(depth):
        nested = {"a": nested}
    with pytest.raises(InvalidRequest, match="too deeply"):
        request_key(None, CALL, "t", {"response_format": nested})
    with pytest.raises(InvalidRequest, match="too deeply"):
        tools_key([Tool("f", nested)], "t")


def test_lone_surrogates_have_keys() -> None:
    assert key(messages=[Message("user", "\ud800")]) != key(messages=[Message("user", "\ud801")])
    assert tools_key([Tool("f", {"d": "\ud800"})], "t") != tools_key([Tool("f", {"d": "\ud801"})], "t")


def test_the_latest_whole_turn_is_the_earlier_call() -> None:
    play = Play()
    assert play.tree.identical("unknown") is None
    first = play.turn("user:u1", "a1")
    second = play.turn("user:u1", "a2")
    interrupted = play.turn("user:u1", "part", finish_reason="abort")
    assert first.turn.request_key == second.turn.request_key == interrupted.turn.request_key
    assert play.tree.identical(first.turn.request_key) is second


def test_an_interrupted_turn_alone_is_no_earlier_call() -> None:
    play = Play()
    node = play.turn("user:u1", "part", finish_reason="abort")
    assert play.tree.identical(node.turn.request_key) is None


def test_the_same_words_elsewhere_in_the_tree_are_no_retry() -> None:
    play = Play()
    play.turn("user:u1", "a1")
    play.turn("user:u1 assistant:a1 user:again", "b1")
    play.turn("user:u1 assistant:a1 user:again assistant:b1 user:again", "b2")
    assert len({node.turn.request_key for node in play.tree}) == 3
    assert list(play.match(says("user:u1 assistant:a1 user:again")).new_messages) == says("user:again")
