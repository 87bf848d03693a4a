"""The messages of a break: the one that was known at its place, and the one that came."""

from __future__ import annotations

import pytest

from capture.play import Play, says
from turnstile.models import BreakEntry, Message, ToolCall
from turnstile_server.capture.break_report import break_entry, broken_turns
from turnstile_server.capture.volatile import VolatileText

LONG = "You are a careful agent that answers in one sentence and then stops, at 10:{:02}"


def entries(play: Play) -> list[BreakEntry]:
    return [break_entry(play.tree, node) for node in broken_turns(play.tree)]


def words(message: Message | None) -> str | None:
    return None if message is None else f"{message.role}:{message.content}"


BASE = "system:s user:u1 assistant:a1 tool:t1 assistant:a2 user:u2"


@pytest.mark.parametrize(
    ("call", "reason", "at", "known", "incoming"),
    [
        ("system:s user:u1 assistant:a1 tool:x assistant:a2 user:u2", "history_edited", 3, "tool:t1", "tool:x"),
        (
            "system:s user:u1 assistant:a1 tool:t1 assistant:x user:u2",
            "reply_edited",
            4,
            "assistant:a2",
            "assistant:x",
        ),
        ("system:s user:u1 user:u2", "reply_edited", 2, "assistant:a1", "user:u2"),
        ("system:s user:new", "new_conversation", 1, "user:u1", "user:new"),
        ("user:new", "new_conversation", 0, "system:s", "user:new"),
        ("system:s", "history_truncated", 0, "user:u1", None),
    ],
)
def test_a_break_has_the_known_and_the_incoming_message(
    call: str, reason: str, at: int, known: str, incoming: str | None
) -> None:
    play = Play()
    play.turn("system:s user:u1", "a1")
    play.turn("system:s user:u1 assistant:a1 tool:t1", "a2")
    last = play.turn(BASE, "a3")
    play.turn(call, "b")
    play.turn(f"{call} assistant:b user:{{}}".replace("{}", "later"), "c")  # the tree grows on
    [entry] = entries(play)
    assert entry.at is not None
    assert (entry.reason, entry.at.message, words(entry.known), words(entry.incoming)) == (
        reason,
        at,
        known,
        incoming,
    )
    assert entry.seq == last.turn.seq + 1
    assert entry.known_turn_id in play.tree


def test_of_two_paths_the_one_that_agrees_for_longest_is_shown() -> None:
    play = Play()
    play.turn("user:u1", "a1")
    play.turn("user:u1 assistant:a1 user:x", "bx")
    kept = play.turn("user:u1 assistant:a1 user:x assistant:bx user:y", "c")
    play.turn("user:u1 assistant:a1 user:z", "bz")
    play.turn("user:u1 assistant:a1 user:x assistant:edited user:y", "d")
    [entry] = entries(play)
    assert (words(entry.known), words(entry.incoming)) == ("assistant:bx", "assistant:edited")
    assert kept.parent is not None
    assert entry.known_turn_id == kept.parent.turn.turn_id


def test_a_changed_system_text_is_shown_beside_the_one_that_it_replaced() -> None:
    play = Play()
    first, second = Message("system", LONG.format(1)), Message("system", LONG.format(2))
    play.turn([first, *says("user:u1")], "a1")
    repeated = play.turn([first, *says("user:u1 assistant:a1 user:u2")], "a2")
    play.turn([second, *says("user:u1 assistant:a1 user:u2 assistant:a2 user:u3")], "a3")
    [entry] = entries(play)
    assert (entry.reason, entry.known, entry.incoming) == ("system_changed", first, second)
    assert entry.known_turn_id == entry.continues == repeated.turn.turn_id


def test_a_reply_that_came_back_in_several_messages_does_not_shift_the_place() -> None:
    calls = (ToolCall("bash", '{"command":"ls"}', "c1"), ToolCall("bash", '{"command":"pwd"}', "c2"))
    play = Play()
    play.turn("user:u1", Message("assistant", "both", tool_calls=calls))
    split = [
        Message("assistant", "both"),
        *(Message("assistant", "", tool_calls=(call,)) for call in calls),
    ]
    play.turn([*says("user:u1"), *split, *says("tool:t1")], "a2")
    play.turn([*says("user:u1"), *split, *says("tool:t1 assistant:edited user:u2")], "a3")
    [entry] = entries(play)
    assert entry.at is not None
    assert entry.at.message == 5
    assert (words(entry.known), words(entry.incoming)) == ("assistant:a2", "assistant:edited")


def test_volatile_system_text_is_not_the_difference() -> None:
    play = Play()
    play.tree._volatile = VolatileText([r"at \d\d:\d\d"])
    play.turn([Message("system", LONG.format(1)), *says("user:u1")], "a1")
    play.turn([Message("system", LONG.format(2)), *says("user:other")], "b1")
    [entry] = entries(play)
    assert entry.at is not None
    assert entry.at.message == 1
    assert (words(entry.known), words(entry.incoming)) == ("user:u1", "user:other")


def test_turns_that_continue_have_no_entry() -> None:
    play = Play()
    play.turn("user:u1", "a1")
    play.turn("user:u1 assistant:a1 user:u2", "a2")
    assert entries(play) == []
