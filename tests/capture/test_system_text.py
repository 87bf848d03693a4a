"""System text that changes from call to call: a clock in the prompt is no new conversation, a sub-agent is."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import FrameType
from typing import Any

import pytest

from capture.play import Play, broken, reply, says
from capture.turns import make_tool
from turnstile.models import BreakReason, Message, Thread, Tool, ToolCall
from turnstile_server.capture import TokenTree, VolatileText
from turnstile_server.capture.breaks import alike
from turnstile_server.capture.volatile import MAX_PATTERN_CHARS, MAX_PATTERNS, MAX_TIMEOUTS, check_patterns

RUN, READ = make_tool("run"), make_tool("read")
PROMPT = "You are a coding agent. Work in the folder, run the tests, and answer with the tools that you have."
CLOCK = r"\d{2}:\d{2}"


MOST_CALLS_OF_A_MATCH = 100_000
"""Function calls: the long history below takes a quarter of it; the square of its length is ten times as many."""


@contextmanager
def counted_calls() -> Iterator[Counter[str]]:
    """Counts the calls of Python functions in the block: work that is the same on every machine."""
    counted: Counter[str] = Counter()

    def count(frame: FrameType, event: str, _argument: Any) -> None:
        if event == "call":
            counted[frame.f_code.co_name] += 1

    sys.setprofile(count)
    try:
        yield counted
    finally:
        sys.setprofile(None)


def clock(time_of_day: str, *rest: Message, role: Any = "system") -> list[Message]:
    return [Message(role, f"{PROMPT} It is {time_of_day}."), *rest]


def dialogue(text: str) -> list[Message]:
    return says(text)


def played(*tools: Sequence[Tool]) -> Play:
    """Three calls of an agent with a clock; ``tools``: what each of them offers."""
    play = Play()
    offers = [*tools, *[tools[-1] if tools else [RUN]] * 3]
    play.turn(clock("10:00", *dialogue("user:u1")), "a1", tools=offers[0])
    play.turn(clock("10:01", *dialogue("user:u1 assistant:a1 tool:t1")), "a2", tools=offers[1])
    play.turn(
        clock("10:02", *dialogue("user:u1 assistant:a1 tool:t1 assistant:a2 tool:t2")), "a3", tools=offers[2]
    )
    return play


def breaks(play: Play) -> list[str]:
    return [node.turn.break_.reason.value for node in play.tree if node.turn.break_ is not None]


# The same conversation


def test_a_clock_in_the_system_prompt_is_a_typed_break_of_the_same_conversation() -> None:
    play = played()
    assert breaks(play) == ["system_changed"] * 2
    assert [kind for _, kind in play.kinds()] == ["main"] * 3
    assert play.untrained() == {}
    out = play.export()
    assert out.stats.rerendered_tokens == 4 + 6
    assert (out.stats.trained_tokens, out.stats.sampled_tokens) == (6, 6)


def test_the_break_names_the_message_that_differs_and_the_turn_that_is_repeated() -> None:
    match = played().match(
        clock("10:03", *dialogue("user:u1 assistant:a1 tool:t1 assistant:a2 user:other")), [RUN]
    )
    assert broken(match) == ("system_changed", 0, "content")
    assert match.broken is not None
    assert match.broken.continues == "turn_1"
    assert match.parent is None


def test_the_last_call_may_offer_no_tools() -> None:
    """An agent at its step limit asks for a final answer. It stays in the main conversation, and is trained."""
    play = played([RUN], [RUN], [])
    assert [kind for _, kind in play.kinds()] == ["main"] * 3
    assert play.untrained() == {}
    assert breaks(play) == ["system_changed"] * 2


def test_the_first_call_may_offer_no_tools_either() -> None:
    play = played([], [RUN], [RUN])
    assert [kind for _, kind in play.kinds()] == ["main"] * 3


def test_with_the_same_tools_the_system_text_may_be_another_one_altogether() -> None:
    play = Play()
    play.turn("system:plan user:u1", "a1", tools=[RUN])
    match = play.match("system:act user:u1 assistant:a1 user:u2", [RUN])
    assert broken(match) == ("system_changed", 0, "content")
    assert broken(play.match("user:u1 assistant:a1 user:u2", [RUN])) == ("system_changed", 0, "role")


@pytest.mark.parametrize("role", ["system", "developer"])
def test_system_text_may_change_behind_the_first_user_message(role: Any) -> None:
    play = Play()
    head = dialogue("system:s user:u1")
    play.turn([*head, *clock("10:00", role=role)], "a1")
    match = play.match([*head, *clock("10:01", role=role), *dialogue("assistant:a1 user:u2")])
    assert broken(match) == ("system_changed", 2, "content")


def test_system_text_may_be_added_or_left_out() -> None:
    play = Play()
    play.turn("system:s user:u1 developer:now", "a1")
    for call, at in (
        ("system:s user:u1 assistant:a1 user:u2", 2),
        ("system:s developer:x user:u1 developer:now assistant:a1 user:u2", 1),
    ):
        match = play.match(call)
        assert broken(match) == ("system_changed", at, "role"), call


def test_a_known_system_text_continues_its_own_path() -> None:
    """A clock that shows minutes: two calls in one minute are one path."""
    play = played()
    more = dialogue("user:u1 assistant:a1 tool:t1 assistant:a2 tool:t2 assistant:a3 tool:t3")
    match = play.match(clock("10:02", *more), [RUN])
    assert (match.parent is not None, match.broken) == (True, None)


def test_a_reply_comes_back_with_its_tolerances() -> None:
    play = Play()
    said = reply("text ", tool_calls=(ToolCall("run", '{"a": 1}', "c1"),), reasoning="r")
    play.turn(clock("10:00", *dialogue("user:u1")), said, tools=[RUN])
    heard = reply("text", tool_calls=(ToolCall("run", '{"a":1}', "other"),))
    match = play.match(clock("10:01", Message("user", "u1"), heard, Message("tool", "t")), [RUN])
    assert broken(match) == ("system_changed", 0, "content")


def test_an_edit_behind_the_repeated_reply_does_not_make_it_another_conversation() -> None:
    match = played().match(clock("10:03", *dialogue("user:u1 assistant:a1 tool:edited assistant:a2")), [RUN])
    assert match.broken is not None
    assert (match.broken.reason, match.broken.continues) == (BreakReason.SYSTEM_CHANGED, "turn_0")


def test_a_reply_that_both_calls_joined_is_known_too() -> None:
    play = Play()
    play.turn(clock("10:00", *dialogue("user:u1")), "a1", finish_reason="abort")
    play.turn(clock("10:00", *dialogue("user:u1 assistant:a1")), "a2")
    match = play.match(clock("10:01", *dialogue("user:u1 assistant:a1a2 user:u2")))
    assert match.broken is not None
    assert (match.broken.reason, match.broken.continues) == (BreakReason.SYSTEM_CHANGED, "turn_1")


# Another conversation


def test_a_sub_agent_with_an_equal_first_message_stays_a_sub_agent() -> None:
    """It repeats no reply of the model. However alike the prompts are: two workers may differ by a number."""
    play = played()
    play.turn(clock("10:03", *dialogue("user:u1")), "b1", tools=[RUN])
    play.turn("system:worker user:u1", "c1", tools=[RUN])
    assert breaks(play)[-2:] == ["new_conversation"] * 2
    assert [kind for _, kind in play.kinds()][-2:] == ["subagent"] * 2
    # It goes on as itself, with and without a clock of its own.
    play.turn("system:worker user:u1 assistant:c1 user:u2", "c2", tools=[RUN])
    play.turn(clock("10:04", *dialogue("user:u1 assistant:b1 user:u2")), "b2", tools=[RUN])
    assert [kind for _, kind in play.kinds()] == ["main"] * 3 + ["subagent"] * 3


def test_two_conversations_with_clocks_are_kept_apart() -> None:
    play = Play()
    other = replace(clock("10:00")[0], content=f"You are the worker. {PROMPT} It is 10:00.")
    ticked = replace(other, content=other.content.replace("10:00", "10:05"))
    play.turn(clock("10:00", *dialogue("user:u1")), "a1", tools=[RUN])
    play.turn([other, *dialogue("user:u1")], "b1", tools=[RUN])
    play.turn(clock("10:01", *dialogue("user:u1 assistant:a1 tool:t")), "a2", tools=[RUN])
    play.turn([ticked, *dialogue("user:u1 assistant:b1 tool:t")], "b2", tools=[RUN])
    later = replace(other, content=other.content.replace("10:00", "10:06"))
    play.turn([later, *dialogue("user:u1 assistant:b1 tool:t assistant:b2 tool:t")], "b3", tools=[RUN])
    assert breaks(play) == ["new_conversation", *["system_changed"] * 3]
    assert [kind for _, kind in play.kinds()] == ["main", "subagent", "main", "subagent", "subagent"]


def test_a_title_or_a_summary_that_is_asked_over_the_same_messages_is_no_continuation() -> None:
    """Both without tools: OpenClaw's title without a system message, Qwen Code's summary with another one."""
    play = played()
    play.turn("user:u1 assistant:a1 user:title", "b", tools=[])
    play.turn("system:summarise user:u1 assistant:a1 user:now", "c", tools=[])
    assert breaks(play)[-2:] == ["new_conversation"] * 2
    assert [kind for _, kind in play.kinds()][-2:] == ["auxiliary"] * 2


def test_headers_that_name_another_conversation_are_believed() -> None:
    play = Play()
    main, other = Thread(name="A"), Thread(name="B", parent="A")
    play.turn(clock("10:00", *dialogue("user:u1")), "a1", tools=[RUN], thread=main)
    play.turn("system:reviewer user:u1 assistant:a1 user:review", "b1", tools=[RUN], thread=other)
    play.turn(clock("10:01", *dialogue("user:u1 assistant:a1 tool:t")), "a2", tools=[RUN], thread=main)
    assert [kind for _, kind in play.kinds()] == ["main", "subagent", "main"]


def test_a_server_clock_that_goes_back_spoils_no_export() -> None:
    play = Play()
    play.turn(clock("10:00", *dialogue("user:u1")), "a1", tools=[RUN], started_at=9.0)
    play.turn(clock("10:01", *dialogue("user:u1 assistant:a1 tool:t")), "a2", tools=[RUN], started_at=5.0)
    play.turn(clock("10:02", *dialogue("user:u1 assistant:a1 user:u")), "a3", tools=[RUN], started_at=3.0)
    assert len(play.kinds()) == 3


def test_other_first_messages_are_another_conversation() -> None:
    assert broken(played().match(clock("10:03", *dialogue("user:u2 assistant:a1 tool:t1")), [RUN])) == (
        "new_conversation",
        0,
        "content",
    )


def test_an_edited_first_reply_is_no_repetition() -> None:
    match = played().match(clock("10:03", *dialogue("user:u1 assistant:edited tool:t1")), [RUN])
    assert match.broken is not None
    assert match.broken.reason == BreakReason.NEW_CONVERSATION


@pytest.mark.slow
def test_a_dialogue_with_a_clock_takes_work_in_its_length_and_not_in_its_square() -> None:
    def work(turns: int) -> int:
        play = Play()
        history: list[Message] = []
        for turn in range(turns):
            history.append(Message("user", f"u{turn}"))
            play.turn([Message("system", f"{PROMPT} {turn}"), *history], f"a{turn}")
            history.append(reply(f"a{turn}"))
        with counted_calls() as counted:
            match = play.match([Message("system", f"{PROMPT} now"), *history, Message("user", "u")])
        assert match.broken is not None
        assert (match.broken.reason, match.broken.continues) == (BreakReason.SYSTEM_CHANGED, f"turn_{turns - 1}")
        return counted.total()

    assert work(120) < 3 * work(60)


@pytest.mark.slow
def test_a_dialogue_that_was_edited_at_its_beginning_is_given_up_after_bounded_work() -> None:
    """Its keys are those of the stored path, because keys lose arguments."""
    play = Play()
    said = reply("a", tool_calls=(ToolCall("run", '{"n": 1}'),))
    history: list[Message] = [Message("user", "u")]
    for _ in range(1_000):
        play.turn([Message("system", "s 1"), *history], said, tools=[RUN])
        history += [said, Message("tool", "t")]
    history[1] = reply("a", tool_calls=(ToolCall("run", '{"n": 2}'),))
    with counted_calls() as counted:
        match = play.match([Message("system", "s 2"), *history], [RUN])
    assert counted.total() < MOST_CALLS_OF_A_MATCH
    assert match.broken is not None
    assert match.broken.reason == BreakReason.NEW_CONVERSATION


@pytest.mark.parametrize(
    ("left", "right", "expected"),
    [
        ("", "", True),
        ("", "s", False),
        ("It is 10:00.", "It is 10:01.", True),
        (f"2026-11-22 {PROMPT} 512 tokens left", f"2026-11-23 {PROMPT} 9 tokens left", True),
        (PROMPT, "Make a title of at most five words for this conversation.", False),
        (PROMPT, "Sum up the conversation so far.", False),
        ("a" * 100_000, "a" * 99_999 + "b", True),
    ],
)
def test_system_texts_are_alike_when_half_of_them_is_shared(left: str, right: str, expected: bool) -> None:
    assert alike(left, right) is alike(right, left) is expected


# Volatile patterns of an agent spec


def tolerant(*patterns: str) -> Play:
    play = Play()
    play.tree = TokenTree(VolatileText(patterns))
    return play


def test_a_volatile_clock_does_not_break_the_conversation_and_is_counted() -> None:
    play = tolerant(CLOCK)
    play.turn(clock("10:00", *dialogue("user:u1")), "a1")
    play.turn(clock("10:00", *dialogue("user:u1 assistant:a1 user:u2")), "a2")
    play.turn(clock("10:01", *dialogue("user:u1 assistant:a1 user:u2 assistant:a2 user:u3")), "a3")
    assert [node.turn.echo for node in play.tree] == [(), (), ("system_volatile",)]
    stats = play.export().stats
    assert (stats.roots, stats.breaks, stats.cosmetic) == (1, {}, {"system_volatile": 1})
    # The text that the model was fed first stays: stored wins.
    [row] = play.rows()
    assert row.count("10:00") == 1
    assert "10:01" not in row


def test_only_system_and_developer_text_is_volatile() -> None:
    play = tolerant(CLOCK)
    play.turn(clock("10:00", *dialogue("developer:10:00 user:10:00")), "10:00")
    assert play.match(clock("10:01", *dialogue("developer:10:01 user:10:00 assistant:10:00 user:u"))).parent
    for call in ("user:10:01 assistant:10:00", "user:10:00 assistant:10:01"):
        assert play.match(clock("10:01", *dialogue(f"developer:10:01 {call} user:u"))).parent is None


def test_what_stands_beside_the_match_is_compared() -> None:
    play = tolerant(CLOCK)
    play.turn(clock("10:00", *dialogue("user:u1")), "a1")
    edited = clock("10:01", *dialogue("user:u1 assistant:a1 user:u2"))
    edited[0] = replace(edited[0], content=edited[0].content.replace("coding", "cooking"))
    assert broken(play.match(edited)) == ("system_changed", 0, "content")


def test_a_repeated_first_call_with_another_time_is_the_same_request() -> None:
    play = tolerant(CLOCK)
    first = play.match(clock("10:00", *dialogue("user:u1")))
    play.turn(clock("10:00", *dialogue("user:u1")), "a1", match=first)
    again = play.match(clock("10:01", *dialogue("user:u1")))
    assert (again.broken, again.request_messages) == (None, first.request_messages)
    play.turn(clock("10:01", *dialogue("user:u1")), "b1", match=again)
    assert [kind for _, kind in play.kinds()] == ["main", "main"]


def test_without_a_difference_nothing_is_counted() -> None:
    play = tolerant(CLOCK, r"\d{1,9} tokens left")
    play.turn(clock("10:00", *dialogue("user:u1")), "a1")
    assert play.match(clock("10:00", *dialogue("user:u1 assistant:a1 user:u2"))).echo == ()


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("(", "not a regular expression"),
        ("x*", "matches an empty text"),
        (r"[\s\S]{1,500}", "any text"),
        ("(?m)^.+$", "any text"),
        (r"(\w|\w\w)+\d", "takes too long"),
        ("(a+)+b", "takes too long"),
        ("(a|a){1,40}b", "takes too long"),
        ("x" * (MAX_PATTERN_CHARS + 1), "at most"),
    ],
)
def test_a_pattern_that_cannot_be_used_is_refused(pattern: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_patterns([pattern])


def test_too_many_patterns_are_refused() -> None:
    with pytest.raises(ValueError, match="at most"):
        check_patterns(["x"] * (MAX_PATTERNS + 1))


def test_hostile_text_is_searched_a_bounded_number_of_times_and_masks_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The pattern is harmless on the texts that are tried when the spec is loaded."""
    volatile = VolatileText([r"(q|qq)+[yz]"])
    hostile = [[Message("system", f"{number}" + "q" * 50_000)] for number in range(20)]
    for messages in hostile:
        assert volatile.masked(messages) is messages
    assert caplog.text.count("took too long") == MAX_TIMEOUTS
