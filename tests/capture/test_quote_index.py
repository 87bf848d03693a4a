"""Quotations are found as by looking for each of them everywhere, in time that does not grow with the turns."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from capture.play import FACTS, Play, reply, says
from capture.turns import make_tool, make_turn
from turnstile.models import Message, ToolCall, Turn
from turnstile_server.capture import CallMatch, export_samples
from turnstile_server.capture.quote_index import QUOTED_CHARS, SUMMARY_SHARE, QuoteIndex

PLACE = CallMatch(parent=None, new_messages=(), echo=(), broken=None, request_messages=())
LONG = "x" * QUOTED_CHARS
# Few and alike, so that texts overlap, contain each other and end alike.
lines = st.sampled_from(
    ["a", "short", LONG, f"{LONG} a", f"a {LONG}", f"/{LONG}", "an argument of some length", "长" * 30]
)
texts = st.lists(lines, max_size=4).map("\n".join)


def turn(seq: int, content: str, *arguments: str) -> Turn:
    calls = tuple(
        ToolCall("run", json.dumps({"v": [text]}), f"call_{index}") for index, text in enumerate(arguments)
    )
    said = Message("assistant", content, tool_calls=calls)
    return make_turn(PLACE, said, seq=seq, tools_key="tools", completion_ids=[1])


@given(st.lists(st.tuples(texts, texts), max_size=4), st.lists(texts, max_size=3))
def test_replies_and_arguments_are_found_as_by_looking_for_each(
    said: list[tuple[str, str]], contents: list[str]
) -> None:
    quotations = QuoteIndex([turn(seq, content, argument) for seq, (content, argument) in enumerate(said)])
    replies = {f"turn_{seq}": quoted(content, contents) for seq, (content, _) in enumerate(said)}
    assert quotations.replies(contents) == {name: length for name, length in replies.items() if length}
    arguments = {f"turn_{seq}": told(argument.strip(), contents) for seq, (_, argument) in enumerate(said)}
    assert quotations.arguments(contents) == {name: length for name, length in arguments.items() if length}


def quoted(content: str, contents: list[str]) -> int:
    whole = content.strip()
    if len(whole) >= QUOTED_CHARS and any(whole in one for one in contents):
        return len(whole)
    found = [
        line for line in whole.split("\n") if len(line) >= QUOTED_CHARS and any(line in one for one in contents)
    ]
    length = sum(map(len, found))
    return length if length >= SUMMARY_SHARE * len(whole) else 0


def told(argument: str, contents: list[str]) -> int:
    word = argument.isascii() and len(argument.split()) == 1
    if len(argument) < QUOTED_CHARS or word:
        return len(argument) if any(one.strip() == argument for one in contents) else 0
    return len(argument) if any(argument in one for one in contents) else 0


@pytest.mark.thorough
@pytest.mark.slow
def test_two_thousand_conversations_have_their_causes_before_anybody_gives_up() -> None:
    """Comparing each with each takes minutes, which the suite does not give it."""
    play = Play()
    tools = [make_tool("run")]
    play.turn(says("system:s user:u"), "a", tools=tools)
    count = 2_000
    more = "look at it closely. " * 20
    for number in range(count):
        call = ToolCall("run", json.dumps({"prompt": f"Task number {number + 1} of many: {more}"}))
        lines_of_it = "\n".join(f"Line {line} of the answer to {number}." for line in range(50))
        asked = (Message("system", "helper"), Message("user", f"Task number {number} of many: {more}"))
        place = CallMatch(parent=None, new_messages=asked, echo=(), broken=None, request_messages=asked)
        play.turn(asked, reply(lines_of_it, tool_calls=(call,)), tools=tools, match=place)
    rows = export_samples(play.tree, FACTS).samples
    assert len(rows) == count + 1
    causes = [row.caused_by.turn_id if row.caused_by else None for row in rows]
    assert causes == [None, None, *(f"turn_{number}" for number in range(1, count))]


def test_a_history_that_is_edited_at_every_call_goes_on_with_the_main_conversation() -> None:
    """Many roots of one beginning."""
    play = Play()
    history = says("system:s user:u1")
    for number in range(40):
        play.turn(history, f"a{number}")
        history = [*history, reply(f"edited{number}"), Message("user", f"u{number + 2}")]
    assert {row.kind for row in play.export().samples} == {"main"}
