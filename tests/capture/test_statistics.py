"""The statistics that are kept turn by turn against a computation over the whole tree."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import event, example, given, settings
from hypothesis import strategies as st

from products import examples
from turnstile.models import (
    Break,
    BreakReason,
    EpisodeStatus,
    Message,
    SamplingUsed,
    ToolCall,
    Turn,
    TurnTimings,
    UpstreamUsage,
)
from turnstile.models import WeightSpan as Span
from turnstile_server.capture import EpisodeFacts, TokenTree, export_samples
from turnstile_server.capture import statistics as statistics_module
from turnstile_server.capture.keys import tools_key
from turnstile_server.capture.node import DeliveryState

NO_TOOLS = tools_key((), "t")
SUMMARIES = tuple(f"a summary of the dialogue, long enough to quote, {number}" for number in range(3))
SAID = ("short", *SUMMARIES)


@dataclass(frozen=True)
class Step:
    """One turn of a random tree. ``parent``: which earlier turn it continues, None: a root."""

    parent: int | None
    tokens: int
    request: str
    reason: str | None
    break_: BreakReason | None
    tools: bool
    one_token: bool
    began: int
    told: str
    reply: str
    asks: bool
    """The reply has a call with ``reply`` as its argument."""
    echo: tuple[str, ...]
    swapped: bool
    """It was committed before the turn that comes before it here."""
    polled: bool
    delivery: DeliveryState = "written"
    later: DeliveryState | None = None
    """What the delivery becomes before the last poll."""
    continues: int | None = None
    """Which earlier turn a broken root goes on from."""
    padded: int = 0
    """As many of its first ids have no token."""


# Tilted to what decides reasons: few requests, many roots, side calls, replies that are quoted.
steps = st.builds(
    Step,
    parent=st.none() | st.integers(0, 6),
    tokens=st.integers(1, 3),
    request=st.sampled_from("abc"),
    reason=st.sampled_from([None] * 8 + ["abort", "given", "constrained", "greedy", "upstream"]),
    break_=st.sampled_from([None] * 3 + [BreakReason.NEW_CONVERSATION] * 3 + [BreakReason.HISTORY_EDITED]),
    tools=st.booleans(),
    one_token=st.sampled_from([False] * 5 + [True]),
    began=st.integers(0, 9),
    told=st.sampled_from(SAID),
    reply=st.sampled_from(SAID),
    asks=st.sampled_from([False, False, True]),
    echo=st.lists(st.sampled_from(["text_trimmed", "reasoning_changed"]), unique=True).map(tuple),
    swapped=st.sampled_from([False, False, False, True]),
    polled=st.sampled_from([True, True, True, False]),
    delivery=st.sampled_from(["written", "written", "lost", "pending"]),
    later=st.sampled_from([None, None, "written", "lost"]),
    continues=st.none() | st.integers(0, 6),
    padded=st.sampled_from([0, 0, 0, 1, 3]),
)


def turn_of(step: Step, number: int, seq: int, known: list[str]) -> Turn:
    parent = known[step.parent % len(known)] if step.parent is not None and known else None
    continues = known[step.continues % len(known)] if step.continues is not None and known else None
    calls = (ToolCall("f", f'{{"x": "{step.reply}"}}'),) if step.asks else ()
    hosted = step.reason == "upstream"
    tokens = 0 if hosted else step.tokens
    counted = None if step.one_token else step.tokens
    return Turn(
        turn_id=f"turn_{number}",
        episode_id="ep_1",
        parent_id=parent,
        seq=seq,
        dialect="chat",
        context_ids=[] if hosted else [0],
        completion_ids=[1] * tokens,
        logprobs=[-0.5] * tokens,
        without_token=tuple(range(min(step.padded, tokens))),
        weight_spans=() if hosted else (Span(start=0, end=tokens, version="w"),),
        upstream=UpstreamUsage(model="m", finish="stop", prompt_tokens=counted, completion_tokens=counted)
        if hosted
        else None,
        finish_reason="abort" if step.reason == "abort" else "stop",
        sampling=SamplingUsed(
            max_new_tokens=1 if step.one_token else 64,
            temperature=0.0 if step.reason == "greedy" else 1.0,
            constrained=step.reason == "constrained",
            given=step.reason == "given",
        ),
        template_hash="t",
        tools_key="offers tools" if step.tools else NO_TOOLS,
        request_key=step.request,
        new_messages=(Message("user", step.told),),
        reply=Message("assistant", step.reply, tool_calls=calls),
        break_=Break(reason=step.break_, continues=continues) if step.break_ is not None else None,
        echo=step.echo,
        rerendered_tokens=7 if step.break_ is not None else 0,
        timings=TurnTimings(started_at=float(step.began)),
    )


def made_step(parent: int | None, began: int, **fields: Any) -> Step:
    plain = Step(parent, 1, str(began), None, None, True, False, began, "short", "short", False, (), False, True)
    return replace(plain, **fields)


MAIN = made_step(None, 0)
SIDE_CALL = made_step(None, 1, break_=BreakReason.NEW_CONVERSATION, tools=False, reply=SUMMARIES[0])
ON_FROM_IT = made_step(None, 5, break_=BreakReason.NEW_CONVERSATION, told=SUMMARIES[0])
SAME_WORDS_LATER = made_step(0, 3, reply=SUMMARIES[0])
"""Began before the root that quotes it and is committed after it: now the root is caused by this turn."""
SAME_REQUEST = made_step(0, 6, request=SIDE_CALL.request)
FOLLOWS = made_step(2, 7)


FIRST_SEQ = 100
"""Of an episode's own turns: inherited ones come before."""


def inherited_turns(before: list[Step]) -> list[Turn]:
    """A path of another episode's tree."""
    turns: list[Turn] = []
    for number, step in enumerate(before):
        known = [turns[-1].turn_id] if turns else []
        made = turn_of(replace(step, parent=0), number, number, known)
        turns.append(made.model_copy(update={"turn_id": f"before_{number}", "episode_id": "ep_0"}))
    return turns


@example([MAIN, SIDE_CALL, made_step(0, 2), ON_FROM_IT, SAME_WORDS_LATER], {}, [])
@example([MAIN, SIDE_CALL, SAME_REQUEST, FOLLOWS], {}, [])
@example([made_step(0, 2), made_step(0, 3)], {}, [SIDE_CALL])
@settings(max_examples=examples(600))
@given(
    st.lists(steps, min_size=1, max_size=16),
    st.dictionaries(st.sampled_from("xy"), st.integers(1, 9)),
    st.lists(steps, max_size=3),
)
def test_kept_statistics_are_those_of_the_whole_tree(
    made: list[Step], discarded: dict[str, int], before: list[Step]
) -> None:
    tree, known = TokenTree(), list[str]()
    inherited = inherited_turns(before)
    tree.graft(inherited)
    known += [turn.turn_id for turn in inherited]
    facts = EpisodeFacts(episode_id="ep_1", rollout_id="ep_1", status=EpisodeStatus.RUNNING, discarded=discarded)
    for number, step in enumerate(made):
        # A turn may get its number in the order of commits before another and reach the tree after it.
        seq = FIRST_SEQ + 2 * number + (0 if step.swapped else 3)
        tree.add(turn_of(step, number, seq, known)).record_delivery(step.delivery)
        known.append(f"turn_{number}")
        if step.polled or number == len(made) - 1:
            kept, whole = tree.statistics(discarded), export_samples(tree, facts).stats
            assert kept == whole
            assert (kept.turns, kept.sampled_tokens) == (
                number + 1,
                sum(each.tokens for each in made[: number + 1] if each.reason != "upstream"),
            )
            for reason in kept.untrained:
                event(reason)
    for number, step in enumerate(made):
        if step.later is not None:
            tree[f"turn_{number}"].record_delivery(step.later)
            assert tree.statistics(discarded) == export_samples(tree, facts).stats


def long_tree(turns: int) -> TokenTree:
    tree = TokenTree()
    for number in range(turns):
        extended(tree, number)
    return tree


def extended(tree: TokenTree, number: int) -> None:
    """One more turn at the end of a line."""
    tree.add(turn_of(made_step(0, number), number, number, [f"turn_{number - 1}"] if number else []))


def test_asking_for_the_statistics_of_a_long_episode_visits_no_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    tree = long_tree(500)
    tree.statistics({})

    def visited(*_: object) -> None:
        raise AssertionError("the turns were visited")

    monkeypatch.setattr(statistics_module, "auxiliary_roots", visited)
    monkeypatch.setattr(TokenTree, "__iter__", visited)
    assert tree.statistics({"x": 1}).turns == 500
    extended(tree, 500)
    assert tree.statistics({}).turns == 501
