"""Calls that a client keeps as text are the reply that they repeat where that is provable, and else an edit."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from capture.play import Play
from capture.turns import make_tool
from products import examples
from turnstile.models import BreakReason, Message, ToolCall
from turnstile_server.capture import flattened_calls
from turnstile_server.capture.keys import tools_key

TOOL = make_tool("f")


def called(text: str = "", *arguments: Any, first: int = 1) -> Message:
    calls = (ToolCall("f", json.dumps(one), f"call_{n}") for n, one in enumerate(arguments or ({},), first))
    return Message("assistant", text, tool_calls=tuple(calls))


def as_text(reply: Message, text: str | None = None) -> Message:
    """The message that smolagents sends for a reply (``ActionStep.to_messages``)."""
    calls = [
        {"id": c.id, "type": "function", "function": {"name": c.name, "arguments": json.loads(c.arguments)}}
        for c in reply.tool_calls
    ]
    said = reply.content.strip() if text is None else text
    return Message("assistant", (f"{said}\n" if said else "") + f"Calling tools:\n{calls}")


def observed(text: str = "r") -> Message:
    return Message("user", f"Observation:\n{text}")


GO = [Message("user", "go")]


def test_a_conversation_of_such_replies_is_one_path() -> None:
    play, history = Play(), list(GO)
    replies = [
        called("", {"a": 'it\'s "quoted"\n', "n": [1.0, None, True]}),
        called(" I look.\n", {"b": {}}, first=3),
        called("", {"c": 1}, {"d": 2}, first=5),
    ]
    for count, said in enumerate(replies):
        node = play.turn(history, said, tools=[TOOL])
        assert (node.turn.break_, len(node.turn.echo), node.depth) == (None, min(count, 1), count)
        history += [as_text(said), observed()]
    match = play.match(history, [TOOL])
    assert match.parent is play.tree["turn_2"]
    assert (match.echo, match.new_messages) == (("calls_as_text",), (observed(),))


STORED = called("I look.", {"a": "x"})


@pytest.mark.parametrize(
    "sent",
    [
        as_text(STORED, "I look"),
        as_text(STORED, "I look. And more."),
        as_text(STORED, ""),
        as_text(called("I look.", {"a": "y"})),
        as_text(called("I look.", {"a": "x", "b": 1})),
        as_text(called("I look.", {"a": "x"}, first=2)),
        as_text(called("I look.", {"a": "x"}, {})),
        as_text(replace(STORED, tool_calls=(replace(STORED.tool_calls[0], name="g"),))),
        replace(as_text(STORED), content=as_text(STORED).content + " "),
        Message("assistant", "I look.\nCalling tools:\n[{'id': 'call_1', }}]"),
        Message("assistant", "}}]"),
    ],
)
def test_whatever_else_it_says_is_an_edit_as_before(sent: Message) -> None:
    play = Play()
    play.turn(GO, STORED, tools=[TOOL])
    match = play.match([*GO, sent, observed()], [TOOL])
    assert match.parent is None
    assert match.broken is not None
    assert match.broken.reason is BreakReason.REPLY_EDITED


def test_such_a_text_of_a_user_or_a_tool_is_never_a_reply() -> None:
    play = Play()
    play.turn(GO, STORED, tools=[TOOL])
    for role in ("user", "tool", "system"):
        sent = replace(as_text(STORED), role=role)  # type: ignore[arg-type]
        assert play.match([*GO, sent], [TOOL]).parent is None


def test_a_reply_of_other_arguments_than_can_be_compared_in_time_is_an_edit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    play = Play()
    play.turn(GO, STORED, tools=[TOOL])
    monkeypatch.setattr(flattened_calls, "MOST_CHARS", 5)
    assert play.match([*GO, as_text(STORED)], [TOOL]).parent is None


def test_arguments_that_are_nested_too_deeply_are_an_edit() -> None:
    deep = "[" * 900 + "]" * 900
    play = Play()
    play.turn(GO, replace(STORED, tool_calls=(ToolCall("f", f'{{"a": {deep}}}', "call_1"),)), tools=[TOOL])
    assert play.match([*GO, as_text(STORED)], [TOOL]).parent is None


def test_a_conversation_that_was_rendered_anew_goes_on_from_there() -> None:
    """The new root's messages have the text, and later calls repeat it."""
    play = Play()
    play.turn(GO, STORED, tools=[TOOL])
    other = [Message("user", "something else"), as_text(STORED), observed()]
    second = called("", {"z": 1}, first=2)
    root = play.turn(other, second, tools=[TOOL])
    assert root.parent is None
    match = play.match([*other, as_text(second), observed("s")], [TOOL])
    assert (match.parent, match.broken, match.new_messages) == (root, None, (observed("s"),))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
OBJECTS = st.dictionaries(st.text(), JSON, max_size=4)


@pytest.mark.slow
@settings(max_examples=examples(200))
@given(st.text(), st.lists(OBJECTS, min_size=1, max_size=3))
def test_any_reply_that_is_kept_as_text_is_found_again(text: str, arguments: list[dict[str, Any]]) -> None:
    said = called(text, *(flattened_calls._serialised(one) for one in arguments))
    play = Play()
    node = play.turn(GO, said, tools=[TOOL])
    assert play.match([*GO, as_text(said), observed()], [TOOL]).parent is node
    longer = as_text(said, f"{text.strip()} and more")
    assert play.match([*GO, longer, observed()], [TOOL]).parent is None


@settings(max_examples=examples(100))
@given(st.permutations(range(4)), st.data())
def test_tools_in_another_order_are_the_same_offer(order: list[int], data: st.DataObject) -> None:
    """Also with the keys of each in another order; what the model was fed stays."""
    offered = [make_tool(f"t{n}", {"x": {"type": "string", "default": n}}, "does it") for n in range(4)]
    shuffled = [replace(offered[n], spec=data.draw(reordered(offered[n].spec))) for n in order]
    assert tools_key(shuffled, "t") == tools_key(offered, "t")
    play, said = Play(), called("")
    node = play.turn(GO, said, tools=offered)
    match = play.match([*GO, said, Message("tool", "r", tool_call_id="call_1")], shuffled)
    assert (match.parent, match.broken, match.echo) == (node, None, ())


def reordered(value: Any) -> st.SearchStrategy[Any]:
    """The same JSON value with the keys of its objects in any order."""
    if not isinstance(value, dict):
        return st.just(value)
    return st.permutations(sorted(value)).flatmap(
        lambda keys: st.fixed_dictionaries({key: reordered(value[key]) for key in keys})
    )


@settings(max_examples=examples(200))
@given(OBJECTS, st.data())
def test_arguments_that_are_encoded_anew_are_the_same_call(arguments: dict[str, Any], data: st.DataObject) -> None:
    said = called("", arguments)
    spelled = json.dumps(
        data.draw(reordered(arguments)),
        ensure_ascii=data.draw(st.booleans()),
        separators=data.draw(st.sampled_from([(",", ":"), (", ", ": "), (" ,", " :  ")])),
        indent=data.draw(st.sampled_from([None, 2])),
    )
    sent = replace(said, tool_calls=(replace(said.tool_calls[0], arguments=spelled, id="other"),))
    play = Play()
    node = play.turn(GO, said, tools=[TOOL])
    match = play.match([*GO, sent, Message("tool", "r")], [TOOL])
    same = spelled == said.tool_calls[0].arguments
    assert (match.parent, match.echo) == (node, () if same else ("arguments_reserialised",))
