"""A prompt that came as ids continues the turn whose tokens it begins with exactly, and no other."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from capture.turns import make_turn
from products import examples
from turnstile.models import BreakReason, Message
from turnstile_server.capture import TokenTree
from turnstile_server.capture.match import CallMatch

IDS = st.lists(st.integers(0, 1), max_size=4)
"""Of two ids, so that prompts share beginnings."""


def ask(tree: TokenTree, prompt: list[int], completion: list[int]) -> CallMatch:
    """One call, committed."""
    match = tree.match_ids(np.array(prompt, np.int32))
    start = 0 if match.parent is None else match.parent.token_count
    turn = make_turn(
        match,
        Message("assistant", str(completion)),
        seq=len(tree),
        tools_key="t",
        completion_ids=completion,
        context_ids=prompt[start:],
    )
    tree.add(turn)
    return match


@settings(max_examples=examples(200))
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 9), IDS, IDS.filter(bool)), min_size=1, max_size=12))
def test_the_parent_is_the_deepest_turn_that_is_a_beginning_of_the_prompt(
    calls: list[tuple[bool, int, list[int], list[int]]],
) -> None:
    tree = TokenTree()
    for goes_on, place, more, completion in calls:
        nodes = list(tree)
        before = nodes[place % len(nodes)].tokens().tolist() if goes_on and nodes else []
        prompt = [*before, *more] or [1]
        beginnings = [node for node in tree if prompt[: node.token_count] == node.tokens().tolist()]
        match = ask(tree, prompt, completion)
        deepest = max(beginnings, key=lambda node: (node.token_count, node.seq), default=None)
        assert match.parent is deepest
        newest = tree.newest
        assert newest is not None
        assert newest.tokens().tolist() == [*prompt, *completion]
        if not len(tree) > 1:
            assert match.broken is None


@settings(max_examples=examples(100))
@given(st.lists(st.tuples(IDS.filter(bool), IDS.filter(bool)), min_size=1, max_size=6), st.data())
def test_any_split_of_a_conversation_is_one_path(
    conversation: list[tuple[list[int], list[int]]], data: st.DataObject
) -> None:
    """However each completion is cut into calls that go on from one another, the tokens are the same path."""
    tree, known = TokenTree(), []
    for context, completion in conversation:
        known += context
        cut = data.draw(st.integers(0, len(completion) - 1))
        for part in filter(None, (completion[:cut], completion[cut:])):
            match = ask(tree, known, part)
            assert match.broken is None
            assert (match.parent is None) == (len(tree) == 1)
            known += part
    [leaf] = tree.leaves()
    assert leaf.tokens().tolist() == known


FIRST = [1, 2, 3]
"""The prompt of a turn whose completion is ``[4, 5]``; behind it a second was fed ``[6]`` and sampled ``[7, 8]``.
"""


@pytest.mark.parametrize(
    ("prompt", "parent", "reason", "at"),
    [
        (FIRST, None, None, None),
        ([1, 2], None, BreakReason.NEW_CONVERSATION, "ids[2]"),
        ([9], None, BreakReason.NEW_CONVERSATION, "ids[0]"),
        ([1, 2, 3, 4, 9], None, BreakReason.REPLY_EDITED, "ids[4]"),
        ([1, 2, 3, 6], None, BreakReason.REPLY_EDITED, "ids[3]"),
        ([1, 2, 3, 4], None, BreakReason.REPLY_EDITED, "ids[4]"),
        ([1, 2, 3, 4, 5], "turn_0", None, None),
        ([1, 2, 3, 4, 5, 9], "turn_0", None, None),
        ([1, 2, 3, 4, 5, 6], "turn_0", None, None),
        ([1, 2, 3, 4, 5, 6, 7, 9], "turn_0", BreakReason.REPLY_EDITED, "ids[7]"),
        ([1, 2, 3, 4, 5, 6, 7, 8, 9], "turn_1", None, None),
    ],
)
def test_a_prompt_that_leaves_the_known_path_says_where(
    prompt: list[int], parent: str | None, reason: BreakReason | None, at: str | None
) -> None:
    tree = TokenTree()
    ask(tree, FIRST, [4, 5])
    ask(tree, [*FIRST, 4, 5, 6], [7, 8])
    match = tree.match_ids(np.array(prompt, np.int32))
    assert (None if match.parent is None else match.parent.turn_id) == parent
    assert (match.broken and match.broken.reason) == reason
    assert (match.broken and match.broken.at and match.broken.at.path) == at


def test_of_equal_turns_the_one_that_was_written_is_continued() -> None:
    tree = TokenTree()
    for _ in range(3):
        ask(tree, FIRST, [4])
    tree["turn_1"].record_delivery("written")
    match = tree.match_ids(np.array([*FIRST, 4, 5], np.int32))
    assert match.parent is tree["turn_1"]


def test_prompts_of_other_ids_are_other_requests() -> None:
    tree = TokenTree()
    keys = {tree.match_ids(np.array(ids, np.int32)).request_messages for ids in ([1], [2], [1, 2], [256], [1, 0])}
    assert len(keys) == 5
