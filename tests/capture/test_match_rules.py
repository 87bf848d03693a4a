"""Which turn a call continues, row by row of docs/matching.md."""

from __future__ import annotations

from dataclasses import replace

import pytest

from capture.play import Play, broken, reply, says
from capture.turns import make_tool
from turnstile.models import BreakReason, Message, ToolCall
from turnstile_server.capture.keys import tools_key

RUN = make_tool("run", {"code": {"type": "string"}, "n": {"type": "integer", "default": 0}})
READ = make_tool("read", {"path": {"type": "string"}})


def two_turns() -> Play:
    """<system:s> <user:u1> [a1] <tool:t1> [a2]"""
    play = Play()
    play.turn("system:s user:u1", "a1")
    play.turn("system:s user:u1 assistant:a1 tool:t1", "a2")
    return play


def test_an_append_only_conversation_is_one_path() -> None:
    play = two_turns()
    play.turn("system:s user:u1 assistant:a1 tool:t1 assistant:a2 user:u2", "a3")
    assert play.rows() == ["<system:s> <user:u1> [a1] <tool:t1> [a2] <user:u2> [a3]"]


# The call, the path of its parent's reply, its new messages, its break.
CASES: list[tuple[str, str | None, str, tuple[str, int, str] | None]] = [
    # Continuations and siblings
    ("system:s user:u1 assistant:a1 tool:t1 assistant:a2 user:u2", "a2", "user:u2", None),
    ("system:s user:u1 assistant:a1 tool:t1", "a1", "tool:t1", None),
    ("system:s user:u1", None, "system:s user:u1", None),
    ("system:s user:u1 assistant:a1", "a1", "", None),
    # The model is asked elsewhere, but nothing is put into its mouth
    ("system:s user:u1 assistant:a1 tool:edited", "a1", "tool:edited", None),
    ("system:s user:u1 assistant:a1 user:u2 tool:t1", "a1", "user:u2 tool:t1", None),
    # Mid-list system and developer text stays in its place
    ("system:s user:u1 assistant:a1 system:now tool:t1", "a1", "system:now tool:t1", None),
    # An earlier input was edited
    (
        "system:s user:u1 assistant:a1 tool:edited assistant:a2 user:u2",
        "a1",
        "tool:edited assistant:a2 user:u2",
        ("history_edited", 3, "content"),
    ),
    (
        "system:s user:u1 assistant:a1 user:t1 assistant:a2",
        "a1",
        "user:t1 assistant:a2",
        ("history_edited", 3, "role"),
    ),
    # A reply was edited: it is context from there on
    (
        "system:s user:u1 assistant:a1 tool:t1 assistant:edited user:u2",
        "a1",
        "tool:t1 assistant:edited user:u2",
        ("reply_edited", 4, "content"),
    ),
    (
        "system:s user:u1 assistant:edited tool:t1 assistant:a2",
        None,
        "system:s user:u1 assistant:edited tool:t1 assistant:a2",
        ("reply_edited", 2, "content"),
    ),
    ("system:s user:u1 user:u2", None, "system:s user:u1 user:u2", ("reply_edited", 2, "role")),
    # Text that runs on from a reply is that reply, edited
    (
        "system:s user:u1 assistant:a1 assistant:more",
        None,
        "system:s user:u1 assistant:a1 assistant:more",
        ("reply_edited", 2, "content"),
    ),
    # A foreign reply where the model was never asked is no break
    (
        "system:s user:u1 assistant:a1 tool:t1 assistant:a2 user:u2 assistant:foreign user:u3",
        "a2",
        "user:u2 assistant:foreign user:u3",
        None,
    ),
    # The call ends before the reply of the path it shares
    ("system:s", None, "system:s", ("history_truncated", 0, "")),
    # Nothing of the model's is shared
    ("system:s user:other", None, "system:s user:other", ("new_conversation", 1, "content")),
    ("system:other user:u1", None, "system:other user:u1", ("new_conversation", 0, "content")),
    ("user:u1", None, "user:u1", ("new_conversation", 0, "role")),
]


@pytest.mark.parametrize(("call", "parent", "new", "why"), CASES, ids=[case[0] for case in CASES])
def test_a_call_finds_its_parent_and_its_break(
    call: str, parent: str | None, new: str, why: tuple[str, int, str] | None
) -> None:
    match = two_turns().match(call)
    assert (match.parent.turn.reply.content if match.parent else None) == parent
    assert list(match.new_messages) == says(new)
    assert broken(match) == why


def test_the_first_call_is_no_break_whatever_it_holds() -> None:
    match = Play().match("user:u1 assistant:foreign user:u2")
    assert match.parent is None
    assert match.broken is None


def test_history_is_truncated_when_a_call_stops_inside_what_was_fed_at_once() -> None:
    play = Play()
    play.turn("user:u1 user:u2 user:u3", "a1")
    assert broken(play.match("user:u1 user:u2")) == ("history_truncated", 1, "")


def test_a_name_is_part_of_a_foreign_message() -> None:
    play = Play()
    play.turn([Message("user", "u1", name="x")], "a1")
    same = play.match([Message("user", "u1", name="x"), reply("a1"), Message("user", "u2")])
    assert same.parent is not None
    other = play.match([Message("user", "u1", name="y"), reply("a1"), Message("user", "u2")])
    assert broken(other) == ("new_conversation", 0, "name")


def test_an_absent_name_equals_an_empty_one() -> None:
    play = Play()
    play.turn([Message("user", "u1")], "a1")
    assert play.match([Message("user", "u1", name=""), reply("a1"), Message("user", "u2")]).parent is not None


def test_a_tool_call_id_is_not_part_of_a_tool_message() -> None:
    play = Play()
    play.turn([Message("user", "u1")], "a1")
    first = [Message("user", "u1"), reply("a1"), Message("tool", "t1", tool_call_id="x")]
    play.turn(first, "a2")
    renamed = [*first[:2], replace(first[2], tool_call_id="y"), reply("a2"), Message("user", "u2")]
    match = play.match(renamed)
    assert match.parent is not None
    assert match.parent.turn.reply.content == "a2"


def test_foreign_assistant_messages_have_no_tolerance() -> None:
    """Few-shot examples: the model never wrote them, so a trimmed one is another one."""
    play = Play()
    shot = [Message("user", "q"), Message("assistant", "example ", reasoning="r"), Message("user", "u1")]
    play.turn(shot, "a1")
    then = [reply("a1"), Message("user", "u2")]
    assert play.match([*shot, *then]).parent is not None
    trimmed = [shot[0], replace(shot[1], content="example"), shot[2], *then]
    assert broken(play.match(trimmed)) == ("new_conversation", 1, "content")
    unreasoned = [shot[0], replace(shot[1], reasoning=None), shot[2], *then]
    assert broken(play.match(unreasoned)) == ("new_conversation", 1, "reasoning")
    called = replace(shot[1], tool_calls=(ToolCall("run", "{}"),))
    assert broken(play.match([shot[0], called, shot[2], *then])) == ("new_conversation", 1, "tool_calls")


def test_calls_of_foreign_assistant_messages_are_compared_as_written() -> None:
    play = Play()
    call = ToolCall("run", '{"a": 1}', "c1")
    shot = [Message("user", "q"), Message("assistant", tool_calls=(call,)), Message("tool", "t")]
    play.turn(shot, "a1")
    respelled = replace(shot[1], tool_calls=(replace(call, arguments='{"a":1}'),))
    then = [reply("a1"), Message("user", "u2")]
    assert broken(play.match([shot[0], respelled, shot[2], *then])) == ("new_conversation", 1, "tool_calls[0]")
    renamed = replace(shot[1], tool_calls=(replace(call, id="c2"),))
    assert play.match([shot[0], renamed, shot[2], *then]).parent is not None


def test_one_reply_may_come_back_as_several_assistant_messages() -> None:
    """Responses clients send the text and each call of one reply as items of their own."""
    play = Play()
    calls = (ToolCall("run", '{"code": "1"}', "c1"), ToolCall("read", '{"path": "p"}', "c2"))
    play.turn("user:u1", reply("text", tool_calls=calls, reasoning="r"), tools=[RUN, READ])
    parts = [
        Message("assistant", reasoning="r"),
        Message("assistant", "text"),
        *(Message("assistant", tool_calls=(call,)) for call in calls),
    ]
    match = play.match([Message("user", "u1"), *parts, Message("tool", "t1")], [RUN, READ])
    assert match.parent is not None
    assert match.echo == ()
    assert [m.content for m in match.new_messages] == ["t1"]


def test_a_reply_after_a_trailing_assistant_message_matches_with_it() -> None:
    """OpenCode ends its list with an assistant message at its step limit."""
    play = Play()
    play.turn("user:u1", "a1")
    play.turn("user:u1 assistant:a1 user:u2 assistant:stop", "a2")
    match = play.match("user:u1 assistant:a1 user:u2 assistant:stop assistant:a2 user:u3")
    assert match.parent is not None
    assert match.parent.turn.reply.content == "a2"
    assert list(match.new_messages) == says("user:u3")


@pytest.mark.parametrize("echo", ["user:u1 assistant:a1 assistant:a2", "user:u1 assistant:a1a2"])
def test_a_reply_to_a_call_that_ends_in_an_own_reply_comes_back_joined_to_it(echo: str) -> None:
    """Agents go on from partial text; both replies then stand side by side, or as one."""
    play = Play()
    play.turn("user:u1", "a1", finish_reason="abort")
    second = play.turn("user:u1 assistant:a1", "a2")
    assert second.turn.new_messages == ()
    third = play.turn(f"{echo} user:u2", "a3")
    match = play.match(f"{echo} user:u2 assistant:a3 user:u3")
    assert (third.parent, match.parent, match.broken) == (second, third, None)
    # The first reply alone is still a parent of its own, and an edit of the joined one is an edit.
    assert play.match("user:u1 assistant:a1 user:u2").parent is second.parent
    broken = play.match("user:u1 assistant:a1 assistant:other user:u2").broken
    assert broken is not None
    assert (broken.reason, broken.at.message if broken.at else None) == (BreakReason.REPLY_EDITED, 1)


# The key: tools and template ----------------------------------------------------


def offered(*tools: object) -> Play:
    play = Play()
    play.turn("user:u1", "a1", tools=[RUN, READ])
    return play


NEXT = "user:u1 assistant:a1 user:u2"


def test_tools_are_a_set_with_sorted_keys() -> None:
    function = READ.spec["function"]
    read = replace(READ, spec={"function": dict(reversed(function.items())), "type": "function"})
    assert list(read.spec) != list(READ.spec)
    assert offered().match(NEXT, [read, RUN]).parent is not None


@pytest.mark.parametrize(
    "tools",
    [
        [RUN],
        [],
        [RUN, READ, make_tool("more")],
        [RUN, make_tool("read", {"path": {"type": "string"}}, "Reads a file.")],
        [RUN, make_tool("read", {"path": {"type": "number"}})],
    ],
    ids=["removed", "none", "added", "described", "other schema"],
)
def test_other_tools_are_a_break_and_a_new_root(tools: list[object]) -> None:
    match = offered().match(NEXT, tools)  # type: ignore[arg-type]
    assert match.parent is None
    assert broken(match) == ("tools_changed", 2, "")


def test_other_template_options_are_a_break_and_a_new_root() -> None:
    match = offered().match(NEXT, [RUN, READ], template="thinking off")
    assert match.parent is None
    assert broken(match) == ("tools_changed", 2, "")


def test_other_tools_for_an_identical_call_are_a_break() -> None:
    assert broken(offered().match("user:u1", [RUN])) == ("tools_changed", 0, "")


def test_an_edit_is_named_before_a_change_of_tools() -> None:
    assert broken(offered().match("user:u1 assistant:b user:u2", [RUN])) == ("reply_edited", 1, "content")


def test_a_path_with_the_same_tools_explains_a_break_first() -> None:
    play = Play()
    play.turn("user:u1 user:u2", "a1", tools=[RUN])
    play.turn("user:u1 user:u2", "a1", tools=[])
    assert broken(play.match("user:u1", [])) == ("history_truncated", 0, "")


def test_one_text_in_two_tools_is_not_two_texts() -> None:
    """Length prefixes: neither names and specs nor template and name run into each other."""
    assert tools_key([make_tool("ab")], "c") != tools_key([make_tool("a")], "bc")


# Ties ----------------------------------------------------


def called(call_id: str | None, reasoning: str | None = None, text: str = "") -> Message:
    return reply(text, tool_calls=(ToolCall("run", "{}", call_id),), reasoning=reasoning)


def test_ties_go_to_the_reply_whose_call_ids_come_back() -> None:
    play = Play()
    first = play.turn("user:u1", called("c1", "x"), tools=[RUN])
    second = play.turn("user:u1", called("c2", "y"), tools=[RUN])
    second.delivery = "written"
    call = [Message("user", "u1"), called("c1", "y"), Message("tool", "t")]
    assert play.match(call, [RUN]).parent is first


def test_then_to_the_reply_whose_reasoning_comes_back() -> None:
    play = Play()
    first = play.turn("user:u1", called("c1", "x"), tools=[RUN])
    second = play.turn("user:u1", called("c1", "y"), tools=[RUN])
    second.delivery = "written"
    call = [Message("user", "u1"), called("c1", "x"), Message("tool", "t")]
    assert play.match(call, [RUN]).parent is first


def test_then_to_the_latest_written() -> None:
    play = Play()
    nodes = [play.turn("user:u1", "a1") for _ in range(3)]
    assert play.match(NEXT).parent is nodes[2]
    nodes[0].delivery = nodes[1].delivery = "written"
    nodes[2].delivery = "lost"
    assert play.match(NEXT).parent is nodes[1]


def test_where_the_last_replies_look_alike_the_ones_before_decide() -> None:
    """Two parallel sub-agents with one task: each goes on where its own calls were made."""
    play = Play()
    head = [Message("user", "u1")]
    place = play.match(head, [RUN])
    ends = {}
    for call_id in ("c1", "c2"):
        play.turn(head, called(call_id), tools=[RUN], match=place)
        ends[call_id] = play.turn([*head, called(call_id), Message("tool", "t")], "ok", tools=[RUN])
    for call_id, end in ends.items():
        call = [*head, called(call_id), Message("tool", "t"), reply("ok"), Message("user", "u2")]
        assert play.match(call, [RUN]).parent is end


def test_ids_never_decide_a_match() -> None:
    play = Play()
    node = play.turn("user:u1", called("c1"), tools=[RUN])
    for call_id in ("other", None, ""):
        call = [Message("user", "u1"), called(call_id), Message("tool", "t")]
        match = play.match(call, [RUN])
        assert match.parent is node
        assert match.echo == ()


# Interrupted and empty replies ----------------------------------------------------


def test_an_interrupted_reply_can_be_a_parent() -> None:
    """Qwen Code keeps the partial text and asks to resume."""
    play = Play()
    play.turn("user:u1", "part", finish_reason="abort")
    play.turn("user:u1 assistant:part user:resume", "a2")
    assert play.rows() == ["<user:u1> {part} <user:resume> [a2]"]


def test_an_end_of_turn_only_reply_is_a_turn_and_a_parent() -> None:
    """OpenHands sends the empty reply back and adds a nudge."""
    play = Play()
    play.turn("user:u1", "")
    match = play.match([Message("user", "u1"), reply(""), Message("user", "nudge")])
    assert match.parent is not None
    assert [m.content for m in match.new_messages] == ["nudge"]


def test_a_dropped_empty_reply_is_an_edited_reply() -> None:
    """mini-swe-agent drops the assistant message and adds a user message."""
    play = Play()
    play.turn("user:u1", "")
    assert broken(play.match("user:u1 user:nudge")) == ("reply_edited", 1, "role")


# Concurrency ----------------------------------------------------


def test_calls_in_flight_together_become_siblings_in_commit_order() -> None:
    play = Play()
    play.turn("user:u1", "a1")
    places = [play.match(f"user:u1 assistant:a1 user:{word}") for word in ("x", "y")]
    for place, word in reversed(list(zip(places, ("x", "y"), strict=True))):
        play.turn(f"user:u1 assistant:a1 user:{word}", f"b{word}", match=place)
    assert play.rows() == ["<user:u1> [a1] <user:y> [by]", "<user:u1> {a1} <user:x> [bx]"]


def test_a_turn_is_put_once_and_only_below_a_known_parent() -> None:
    play = two_turns()
    turn = play.tree["turn_1"].turn
    with pytest.raises(ValueError, match="turn_1 is in the tree already"):
        play.tree.add(turn)
    with pytest.raises(KeyError):
        play.tree.add(turn.model_copy(update={"turn_id": "turn_9", "parent_id": "unknown"}))
    assert len(play.tree) == 2
    assert [len(node.children) for node in play.tree] == [1, 0]
