"""Which rollouts are imitated, and their tokens and chats as rows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from client.trainer_types import group_of, rollout, sample, turn
from turnstile.exporters.supervised import Accept, pairs, to_chat_rows, to_preference_rows, to_token_rows
from turnstile.models import EpisodeStats, EpisodeStatus
from turnstile.models.messages import Message, ToolCall
from turnstile.rollout import Rollout

LONG = sample(trained=(True, True), sample_id="smp_long")


def with_breaks(reason: str = "reply_edited") -> Rollout:
    made = rollout(1.0)
    assert made.samples is not None
    return replace(made, samples=made.samples.model_copy(update={"stats": EpisodeStats(breaks={reason: 1})}))


REFUSED: dict[str, tuple[Rollout, Accept]] = {
    "ungraded": (rollout(None), Accept(min_reward=0.0)),
    "too low": (rollout(0.5), Accept()),
    "timed out": (rollout(1.0, status=EpisodeStatus.TIMED_OUT), Accept()),
    "broken": (with_breaks(), Accept()),
    "too long": (rollout(1.0), Accept(max_tokens=4)),
    "nothing trained": (rollout(1.0, samples=(sample(trained=(False,)),)), Accept()),
}
TAKEN: dict[str, tuple[Rollout, Accept]] = {
    "right": (rollout(1.0), Accept()),
    "half right": (rollout(0.5), Accept(min_reward=0.5)),
    "timed out": (rollout(1.0, status=EpisodeStatus.TIMED_OUT), Accept(completed=False)),
    "broken": (with_breaks(), Accept(broken=True)),
    "with a sub-agent": (with_breaks("new_conversation"), Accept()),
    "as long as may be": (rollout(1.0), Accept(max_tokens=5)),
}


@pytest.mark.parametrize(("made", "accept"), REFUSED.values(), ids=REFUSED)
def test_what_is_not_to_be_imitated_has_no_row(made: Rollout, accept: Accept) -> None:
    assert list(to_token_rows([made], accept)) == []


@pytest.mark.parametrize(("made", "accept"), TAKEN.values(), ids=TAKEN)
def test_what_is_accepted_has_its_rows(made: Rollout, accept: Accept) -> None:
    assert len(list(to_token_rows([made], accept))) == 1


def test_a_token_is_trained_where_it_was_sampled_and_once() -> None:
    second = sample(trained=(False, True), sample_id="smp_2")
    first, other = to_token_rows([rollout(1.0, samples=(LONG, second))])
    assert first == {"input_ids": list(range(100, 110)), "labels": [*[-100] * 3, 103, 104, *[-100] * 3, 108, 109]}
    assert other["labels"] == [*[-100] * 8, 108, 109]


def ask(text: str) -> Message:
    return Message(role="user", content=text)


CALL = Message(role="assistant", reasoning="hm", tool_calls=(ToolCall("add", '{"a":1}', "call_1"),))
RESULT = Message(role="tool", content="4", tool_call_id="call_1")
ANSWER = Message(role="assistant", content="4")


def test_each_reply_is_the_completion_of_one_row_behind_all_that_came_before_it() -> None:
    turns = [
        turn(ask("3 + 1?"), CALL),
        turn(RESULT, ANSWER, turn_id="turn_2", parent_id="turn_1"),
        turn(ask("cut"), ANSWER, turn_id="turn_3", parent_id="turn_1", finish_reason="length"),
    ]
    first, second = to_chat_rows(turns, tools=[{"type": "function", "function": {"name": "add"}}])
    call: dict[str, Any] = {
        "role": "assistant",
        "content": "",
        "reasoning_content": "hm",
        "tool_calls": [{"type": "function", "id": "call_1", "function": {"name": "add", "arguments": {"a": 1}}}],
    }
    asked = {"role": "user", "content": "3 + 1?"}
    assert (first["prompt"], first["completion"]) == ([asked], [call])
    result = {"role": "tool", "content": "4", "tool_call_id": "call_1"}
    assert (second["prompt"], second["completion"]) == (
        [asked, call, result],
        [{"role": "assistant", "content": "4"}],
    )
    assert first["tools"][0]["function"]["name"] == "add"
    assert "tools" not in next(to_chat_rows(turns))


def test_pairs_are_of_one_group_and_differ() -> None:
    rollouts = [
        *group_of(0.2, 1.0, None, 0.0, 0.8),
        *group_of(1.0, 1.0, group="flat"),
        *group_of(1.0, group="one"),
    ]
    found = [(better.reward, worse.reward) for better, worse in pairs(rollouts)]
    assert found == [(1.0, 0.0)]
    assert [(a.reward, b.reward) for a, b in pairs(rollouts, most=5)] == [(1.0, 0.0), (0.8, 0.2)]
    assert list(pairs(rollouts, margin=1.0)) == []


def test_a_pair_is_tokens_where_both_replied_once_to_the_same_prompt() -> None:
    better, worse = group_of(1.0, 0.0)
    found = to_preference_rows([(better, worse)])
    assert found.rows == [{"prompt_ids": [100, 101, 102], "chosen_ids": [103, 104], "rejected_ids": [103, 104]}]
    assert worse.samples is not None
    several = rollout(0.0, samples=(LONG,))
    other = rollout(0.0, samples=(sample(input_ids=[7, 101, 102, 103, 104]),))
    nothing = rollout(0.0, samples=())
    found = to_preference_rows((better, each) for each in (several, other, nothing))
    assert (found.rows, found.several_replies, found.other_prompt, found.nothing_sampled) == ([], 1, 1, 1)
