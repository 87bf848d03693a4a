"""What a conversation of an episode is, and which turn caused it, told by structure and the agent's headers."""

from __future__ import annotations

import json

import pytest

from capture.play import FACTS, Play, reply
from capture.turns import make_tool
from turnstile.models import Message, Thread, ToolCall
from turnstile_server.capture import export_forest

RUN = make_tool("run")
DELEGATE = make_tool("delegate", {"prompt": {"type": "string"}})
TOOLS = [RUN, DELEGATE]
PROMPT = "Count the lines of every file below src and report the sum."
SUMMARY = "The user wants a parser. Two tests fail; src/parse.py is half done."


def kinds(play: Play) -> list[str]:
    return [kind for _, kind in play.kinds()]


def causes(play: Play) -> list[tuple[str, str] | None]:
    samples = play.export(include_untrained=True).samples
    return [(s.caused_by.turn_id, s.caused_by.by) if s.caused_by is not None else None for s in samples]


def delegating(*prompts: str) -> Message:
    calls = tuple(
        ToolCall("delegate", json.dumps({"prompt": text, "kind": "general"}), f"call_{index}")
        for index, text in enumerate(prompts)
    )
    return Message("assistant", "", tool_calls=calls)


def asks(text: str, system: str = "s") -> list[Message]:
    return [Message("system", system), Message("user", text)]


# By what is offered ----------------------------------------------------


def test_a_new_conversation_with_the_same_system_and_tools_is_a_compaction() -> None:
    play = Play()
    play.turn("system:s user:u1", "a1", tools=[RUN])
    play.turn("system:s user:summary", "a2", tools=[RUN])
    assert kinds(play) == ["main", "compaction"]


def test_each_step_of_a_task_has_a_main_conversation_also_where_it_asks_the_same() -> None:
    play = Play()
    play.turn("system:s user:u1", "a1", tools=[RUN])
    play.turn("system:s user:u1", "a2", tools=[RUN], step=1)
    play.turn("system:s user:title", "a3", step=1)
    play.turn("system:s user:summary", "a4", tools=[RUN], step=1)
    assert kinds(play) == ["main", "main", "auxiliary", "compaction"]
    assert [sample.kind for sample in play.export().samples] == ["main", "main", "compaction"]


@pytest.mark.parametrize(("system", "tool"), [("other", RUN), ("s", make_tool("other"))])
def test_a_new_conversation_with_another_system_or_other_tools_is_a_subagent(system: str, tool: object) -> None:
    play = Play()
    play.turn("system:s user:u1", "a1", tools=[RUN])
    play.turn(f"system:{system} user:task", "a2", tools=[tool])  # type: ignore[list-item]
    assert kinds(play) == ["main", "subagent"]


def test_a_conversation_without_tools_beside_one_with_tools_is_auxiliary_and_not_trained() -> None:
    play = Play()
    play.turn("system:s user:u1", "a1", tools=[RUN])
    play.turn("system:title user:u1", "title")
    play.turn("system:s user:u1 assistant:a1 user:u2", "a2", tools=[RUN])
    assert play.rows() == ["<system:s> <user:u1> [a1] <user:u2> [a2]"]
    assert kinds(play) == ["auxiliary", "main"]
    assert play.untrained() == {"turn_1": "auxiliary"}


def test_a_title_that_is_asked_for_first_is_not_taken_for_the_main_conversation() -> None:
    play = Play()
    play.turn("system:title user:u1", "title", started_at=0.0)
    play.turn("system:s user:u1", "a1", tools=[RUN], started_at=1.0)
    assert kinds(play) == ["auxiliary", "main"]


def test_a_probe_for_one_token_is_auxiliary() -> None:
    play = Play()
    play.turn("user:quota", "a", max_new_tokens=1, finish_reason="length", started_at=0.0)
    play.turn("system:s user:u1", "a1", started_at=1.0)
    assert kinds(play) == ["auxiliary", "main"]


def test_an_agent_that_never_offers_tools_has_no_auxiliary_calls() -> None:
    play = Play()
    play.turn("system:s user:u1", "a1")
    play.turn("system:other user:u1", "a2")
    assert kinds(play) == ["main", "subagent"]
    assert play.untrained() == {}


def test_a_conversation_without_tools_that_goes_on_is_a_subagent() -> None:
    play = Play()
    play.turn("system:s user:u1", "a1", tools=[RUN])
    play.turn("system:other user:task", "b1")
    play.turn("system:other user:task assistant:b1 user:more", "b2")
    assert kinds(play) == ["main", "subagent"]


def test_the_main_conversation_is_the_one_that_began_first_not_the_one_that_answered_first() -> None:
    play = Play()
    main, side = play.match("system:s user:u1", [RUN]), play.match("user:side", [make_tool("other")])
    play.turn("user:side", "a0", tools=[make_tool("other")], match=side, started_at=2.0)
    play.turn("system:s user:u1", "a1", tools=[RUN], match=main, started_at=1.0)
    assert kinds(play) == ["subagent", "main"]


def test_two_equal_first_calls_are_both_the_main_conversation() -> None:
    play = Play()
    first, second = play.match("user:u1"), play.match("user:u1")
    play.turn("user:u1", "a1", match=first)
    play.turn("user:u1", "a2", match=second)
    assert kinds(play) == ["main", "main"]


# Sub-agents ----------------------------------------------------


def test_a_subagent_is_caused_by_the_call_whose_argument_it_begins_with() -> None:
    play = Play()
    play.turn(asks("do it"), delegating(PROMPT), tools=TOOLS)
    play.turn(asks(f"You are a helper.\n\n{PROMPT}\n\nBe brief."), "done", tools=[RUN])
    assert kinds(play) == ["main", "subagent"]
    assert causes(play) == [None, ("turn_0", "call")]


def test_a_subagent_may_be_there_before_the_turn_whose_call_left_while_it_was_sampled() -> None:
    play = Play()
    main, side = play.match(asks("do it"), TOOLS), play.match(asks(PROMPT, "helper"), [RUN])
    play.turn(asks(PROMPT, "helper"), "done", tools=[RUN], match=side, started_at=2.0)
    play.turn(asks("do it"), delegating(PROMPT), tools=TOOLS, match=main, started_at=1.0)
    assert kinds(play) == ["subagent", "main"]
    assert causes(play) == [("turn_1", "call"), None]


def test_a_subagent_with_the_main_system_and_tools_is_no_compaction_when_a_call_caused_it() -> None:
    play = Play()
    play.turn(asks("do it"), delegating(PROMPT), tools=TOOLS)
    play.turn(asks(PROMPT), "done", tools=TOOLS)
    assert kinds(play) == ["main", "subagent"]


def test_parallel_and_nested_subagents_each_have_their_own_cause() -> None:
    play = Play()
    inner = "Look only at src/lexer.py, and count its lines twice."
    play.turn(asks("do it"), delegating(PROMPT, "Find out who calls the parser, and how often."), tools=TOOLS)
    play.turn(asks(PROMPT, "helper"), delegating(inner), tools=TOOLS)
    play.turn(asks("Find out who calls the parser, and how often.", "helper"), "nobody", tools=TOOLS)
    play.turn(asks(inner, "helper"), "12 and 12", tools=TOOLS)
    assert causes(play) == [None, ("turn_0", "call"), ("turn_0", "call"), ("turn_1", "call")]


def test_a_short_prompt_counts_only_as_the_whole_message() -> None:
    play = Play()
    play.turn(asks("do it"), delegating("ls"), tools=TOOLS)
    play.turn(asks("false alarms: ls is fine"), "a", tools=[RUN])
    play.turn(asks("ls"), "b", tools=[RUN])
    assert causes(play) == [None, None, ("turn_0", "call")]


def test_headers_tell_a_subagent_and_its_parent_where_the_text_does_not() -> None:
    play = Play()
    play.turn(asks("do it"), "I will have it done.", tools=TOOLS, thread=Thread(name="t1"))
    play.turn(asks("rewritten"), "done", tools=TOOLS, thread=Thread(name="t2", parent="t1"))
    assert kinds(play) == ["main", "subagent"]
    assert causes(play) == [None, ("turn_0", "thread")]


def test_a_rewritten_history_of_a_subagent_stays_the_subagents() -> None:
    play = Play()
    play.turn(asks("do it"), delegating(PROMPT), tools=TOOLS)
    play.turn(asks(PROMPT, "helper"), "half", tools=[RUN])
    changed = [*asks(PROMPT, "helper"), reply("edited"), Message("user", "go on")]
    play.turn(changed, "whole", tools=[RUN])
    assert kinds(play) == ["main", "subagent", "subagent"]


# Compaction ----------------------------------------------------


def compacted(*, tools_for_summary: list[object]) -> Play:
    play = Play()
    play.turn(asks("do it"), "a1", tools=TOOLS)
    asked = [*asks("do it"), reply("a1"), Message("user", "Sum up.")]
    play.turn(asked, SUMMARY, tools=tools_for_summary)  # type: ignore[arg-type]
    play.turn(asks(f"Earlier work:\n{SUMMARY}\nGo on.", "another system"), "a2", tools=TOOLS)
    return play


def test_what_begins_with_a_quoted_reply_is_a_compaction_caused_by_it() -> None:
    play = compacted(tools_for_summary=list(TOOLS))
    assert kinds(play) == ["main", "compaction"]
    assert causes(play) == [None, ("turn_1", "summary")]
    assert play.untrained() == {}


def test_a_summary_that_was_asked_for_without_tools_is_of_the_compaction_and_trained() -> None:
    play = compacted(tools_for_summary=[])
    assert kinds(play) == ["main", "compaction", "compaction"]
    assert play.untrained() == {}


def test_a_summary_by_another_prompt_and_without_tools_is_no_auxiliary_call_when_something_is_built_on_it() -> (
    None
):
    play = Play()
    play.turn(asks("do it"), "a1", tools=TOOLS)
    play.turn(asks("Here is a transcript: do it, a1", "You sum up."), SUMMARY)
    play.turn(asks(f"Go on from here. {SUMMARY}"), "a2", tools=TOOLS)
    assert kinds(play) == ["main", "compaction", "compaction"]
    assert causes(play) == [None, None, ("turn_1", "summary")]
    assert play.untrained() == {}


def test_a_summary_may_be_quoted_without_what_the_model_thought_aloud_before_it() -> None:
    play = Play()
    play.turn(asks("do it"), "a1", tools=TOOLS)
    aloud = "<analysis>\nI go through it from the start.\n</analysis>\n<summary>\n"
    asked = [*asks("do it"), reply("a1"), Message("user", "Sum up.")]
    play.turn(asked, f"{aloud}{SUMMARY}\n</summary>", tools=TOOLS)
    play.turn(asks(f"This session goes on.\n{SUMMARY}\nDo not recap."), "a2", tools=TOOLS)
    assert causes(play) == [None, ("turn_1", "summary")]


def test_a_summary_given_back_as_the_models_own_words_is_one_where_it_was_asked_for_aside() -> None:
    """OpenCode begins anew with a question, the summary as its answer, and what was said last."""
    play = Play()
    play.turn(asks("do it"), "a1", tools=TOOLS)
    play.turn(asks("Sum up: do it, a1", "You sum up."), SUMMARY)
    play.turn([*asks("What did we do so far?"), reply(SUMMARY), Message("user", "Go on.")], "a2", tools=TOOLS)
    assert kinds(play) == ["main", "compaction", "compaction"]
    assert causes(play) == [None, None, ("turn_1", "summary")]


def test_a_compaction_that_begins_with_the_first_question_again_is_told_by_the_summary_behind_it() -> None:
    """Codex keeps the user's messages and puts the summary in the place of the replies."""
    play = Play()
    play.turn(asks("do it"), "a1", tools=TOOLS)
    play.turn([*asks("do it"), reply("a1"), Message("user", "Sum up.")], SUMMARY)
    play.turn([*asks("do it"), Message("user", f"A summary:\n{SUMMARY}")], "a2", tools=TOOLS)
    assert kinds(play) == ["main", "compaction", "compaction"]
    assert causes(play) == [None, None, ("turn_1", "summary")]


def test_a_complaint_that_quotes_a_dropped_reply_is_no_compaction() -> None:
    play = Play()
    play.turn(asks("do it"), SUMMARY, tools=TOOLS)
    play.turn([*asks("do it"), Message("user", f"No tool call in: {SUMMARY}")], "a2", tools=TOOLS)
    assert kinds(play) == ["main", "main"]


def test_what_a_tool_says_of_a_call_is_no_cause() -> None:
    play = Play()
    call = ToolCall("run", json.dumps({"code": "print('a long command of its own')"}), "call_1")
    play.turn(asks("do it"), Message("assistant", "", tool_calls=(call,)), tools=TOOLS)
    echoed = Message("tool", "ran print('a long command of its own')", tool_call_id="call_1")
    play.turn([*asks("changed"), reply("edited"), echoed], "a2", tools=TOOLS)
    assert causes(play) == [None, None]


def test_a_summary_on_which_nothing_is_built_goes_on_with_the_main_conversation() -> None:
    """Codex and OpenCode ask for the summary with no tools: re-rendered, but the same conversation."""
    play = Play()
    play.turn("system:s user:u1", "a1", tools=[RUN])
    node = play.turn("system:s user:u1 assistant:a1 user:summarise", "a2")
    assert node.turn.break_ is not None
    assert node.turn.break_.reason == "tools_changed"
    assert kinds(play) == ["main", "main"]
    assert play.export().stats.rerendered_tokens == 4


@pytest.mark.parametrize(
    "call",
    ["user:u1 assistant:edited user:u2", "user:u1 user:u2"],
    ids=["edited reply", "dropped reply"],
)
def test_an_edited_history_goes_on_with_the_main_conversation(call: str) -> None:
    play = Play()
    play.turn("user:u1", "a1")
    play.turn(call, "a2")
    assert kinds(play) == ["main", "main"]


def test_causes_are_on_the_rows_of_the_forest_too() -> None:
    play = compacted(tools_for_summary=list(TOOLS))
    forest = export_forest(play.tree, FACTS)
    assert [row.caused_by for row in forest.rows] == [s.caused_by for s in play.export().samples]


def test_a_path_in_an_argument_is_no_cause_of_a_conversation_that_names_it_too() -> None:
    play = Play()
    path = "/workspace/project/src/parser.py"
    play.turn(asks("do it"), delegating(path), tools=TOOLS)
    play.turn(asks(f"What is {path} for?", "helper"), "nothing", tools=[RUN])
    play.turn(asks(f" {path}\n", "helper"), "nothing", tools=[RUN])
    assert causes(play) == [None, None, ("turn_0", "call")]


# Where one rule gives way to another ----------------------------------------------------


def test_an_agent_that_asks_for_single_tokens_only_has_no_auxiliary_calls() -> None:
    play = Play()
    play.turn("system:s user:u1", "a", max_new_tokens=1)
    play.turn("system:other user:u1", "b", max_new_tokens=1)
    assert kinds(play) == ["main", "subagent"]


def test_a_root_that_shares_as_much_with_an_auxiliary_call_goes_on_with_the_main_conversation() -> None:
    play = Play()
    play.turn("system:s user:u1", "title", started_at=0.0)
    play.turn("system:s user:u1", "a1", tools=[RUN], started_at=1.0)
    play.turn("system:s user:u1 assistant:edited user:u2", "a2", tools=[RUN], started_at=2.0)
    assert kinds(play) == ["auxiliary", "main", "main"]


def test_headers_alone_tell_a_subagent_from_a_compaction() -> None:
    play = Play()
    play.turn(asks("do it"), "a1", tools=TOOLS, thread=Thread(name="t1"))
    play.turn(asks("rewritten"), "a2", tools=TOOLS, thread=Thread(name="t2"))
    play.turn(asks("summed up"), "a3", tools=TOOLS, thread=Thread(name="t1"))
    assert kinds(play) == ["main", "subagent", "compaction"]


def test_a_call_that_came_later_is_no_cause() -> None:
    play = Play()
    play.turn(asks("do it"), "a1", tools=TOOLS)
    play.turn(asks(PROMPT, "helper"), "done", tools=[RUN])
    play.turn([*asks("do it"), reply("a1"), Message("user", "again")], delegating(PROMPT), tools=TOOLS)
    assert causes(play) == [None, None]


def test_the_longest_quotation_is_the_cause_then_the_latest() -> None:
    play = Play()
    once = [*asks("do it"), delegating(PROMPT), Message("tool", "done", tool_call_id="call_0")]
    play.turn(asks("do it"), delegating(PROMPT), tools=TOOLS)
    play.turn(once, delegating(PROMPT[:30]), tools=TOOLS)
    play.turn(asks(PROMPT, "helper"), "done", tools=[RUN])
    assert causes(play)[1] == ("turn_0", "call")
    play.turn(asks("begin anew"), delegating(PROMPT), tools=TOOLS)
    play.turn(asks(f"{PROMPT} Once more.", "helper"), "done", tools=[RUN])
    assert causes(play)[-1] == ("turn_3", "call")


def test_the_latest_turn_of_the_parents_thread_is_the_cause() -> None:
    play = Play()
    play.turn(asks("do it"), "a1", tools=TOOLS, thread=Thread(name="t1"))
    play.turn([*asks("do it"), reply("a1"), Message("user", "more")], "a2", tools=TOOLS, thread=Thread(name="t1"))
    play.turn(asks("rewritten"), "done", tools=TOOLS, thread=Thread(name="t2", parent="t1"))
    assert causes(play) == [None, ("turn_1", "thread")]


def test_a_reply_of_the_main_path_that_comes_back_as_a_reply_is_history_and_no_summary() -> None:
    play = Play()
    play.turn(asks("do it"), SUMMARY, tools=TOOLS)
    play.turn([*asks("other", "helper"), reply(SUMMARY), Message("user", "more")], "a2", tools=[RUN])
    assert kinds(play) == ["main", "subagent"]
    assert causes(play) == [None, None]
