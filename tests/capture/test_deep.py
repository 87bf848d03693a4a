"""Trees of thousands of turns: no recursion, and work that grows with the call and not with its square."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from capture.play import FACTS, broken
from capture.turns import make_tool, make_turn
from turnstile.models import Message, ToolCall
from turnstile_server.capture import CallMatch, TokenTree, breaks, compare, export_samples, keys, match
from turnstile_server.capture.compare import Comparison, Schemas
from turnstile_server.capture.keys import tools_key
from turnstile_server.capture.tree import CACHED_PATHS

pytestmark = pytest.mark.slow

TURNS = 5_000
KEY = tools_key([], "t")
TOOL = Message("tool", "t")


def answer(index: int) -> Message:
    return Message("assistant", "", tool_calls=(ToolCall("run", f'{{"i": {index}}}', f"c{index}"),))


def conversation(turns: int) -> list[Message]:
    messages = [Message("user", "u")]
    for index in range(turns):
        messages += [answer(index), TOOL]
    return messages


def path_of(turns: int) -> TokenTree:
    """One path: every reply a call that differs in its argument only."""
    tree = TokenTree()
    parent = None
    for index in range(turns):
        new = (Message("user", "u"),) if parent is None else (TOOL,)
        place = CallMatch(parent=parent, new_messages=new, echo=(), broken=None, request_messages=new)
        parent = tree.add(
            make_turn(place, answer(index), seq=index, tools_key=KEY, completion_ids=[7, 8], context_ids=[index])
        )
    assert parent is not None
    parent.record_delivery("written")
    return tree


@pytest.fixture(scope="module")
def deep() -> TokenTree:
    """5,000 turns, to which no test adds any."""
    return path_of(TURNS)


class Comparisons(Counter[str]):
    """Counts the comparisons of messages that a match makes."""


@pytest.fixture
def compared(monkeypatch: pytest.MonkeyPatch) -> Comparisons:
    counts = Comparisons()

    def reply(stored: Message, incoming: Message, schemas: Schemas) -> Comparison:
        counts["reply"] += 1
        return compare.compare_reply(stored, incoming, schemas)

    def foreign(stored: Message, incoming: Message) -> Comparison:
        counts["foreign"] += 1
        return compare.compare_foreign(stored, incoming)

    monkeypatch.setattr(match, "compare_reply", reply)
    monkeypatch.setattr(match, "compare_foreign", foreign)
    return counts


def test_a_deep_path_is_continued_with_one_comparison_per_message(deep: TokenTree, compared: Comparisons) -> None:
    found = deep.match(conversation(TURNS), [], KEY)
    assert found.parent is deep[f"turn_{TURNS - 1}"]
    assert found.new_messages == (TOOL,)
    assert found.broken is None
    assert compared == {"reply": TURNS, "foreign": TURNS}


@pytest.mark.parametrize("at", [0, 1, TURNS // 2, TURNS - 1])
def test_an_edit_anywhere_in_a_deep_path_costs_no_more_than_the_path(
    deep: TokenTree, compared: Comparisons, at: int
) -> None:
    """The keys do not hold arguments, so every deeper turn is a candidate; each is compared at most twice, once
    to find the parent and once to explain the break."""
    call = conversation(TURNS)
    edited = replace(answer(at), tool_calls=(ToolCall("run", '{"i": -1}'),))
    call[1 + 2 * at] = edited
    found = deep.match(call, [], KEY)
    assert found.parent is (deep[f"turn_{at - 1}"] if at else None)
    assert broken(found) == ("reply_edited", 1 + 2 * at, "tool_calls[0].arguments")
    assert max(compared.values()) <= 2 * TURNS


def test_many_twins_share_the_comparison_of_their_path(compared: Comparisons) -> None:
    """A thousand resamplings at the end of a path of a thousand turns."""
    tree, count = TokenTree(), 1_000
    parent = None
    for index in range(count):
        new = (Message("user", "u"),) if parent is None else (TOOL,)
        place = CallMatch(parent=parent, new_messages=new, echo=(), broken=None, request_messages=new)
        parent = tree.add(make_turn(place, answer(index), seq=index, tools_key=KEY, completion_ids=[7]))
    place = CallMatch(parent=parent, new_messages=(TOOL,), echo=(), broken=None, request_messages=(TOOL,))
    for index in range(count, 2 * count):
        last = tree.add(make_turn(place, answer(0), seq=index, tools_key=KEY, completion_ids=[7]))
    found = tree.match([*conversation(count), answer(0), TOOL], [], KEY)
    assert found.parent is last
    assert compared == {"reply": 2 * count, "foreign": 2 * count}


def test_calls_that_leave_a_path_at_one_place_again_and_again_do_not_compare_it_again(
    compared: Comparisons,
) -> None:
    """As resamplings of a turn do, with some turns of each: other paths are cached meanwhile."""
    tree, start = path_of(200), 100
    for branch in range(3 * CACHED_PATHS):
        call = [*conversation(start), Message("user", f"branch {branch}")]
        for depth in range(3):
            found, seq = tree.match(call, [], KEY), len(tree)
            node = tree.add(make_turn(found, answer(seq), seq=seq, tools_key=KEY, completion_ids=[7, 8]))
            node.record_delivery("written")
            assert node.depth == start + depth
            call += [answer(seq), TOOL]
        if branch == 0:
            compared.clear()
    assert max(compared.values()) <= 3 * 3 * CACHED_PATHS, "one for each call, and none for what is above"


def test_of_several_known_paths_the_deepest_is_gone_on_from(deep: TokenTree, compared: Comparisons) -> None:
    deep.match(conversation(TURNS), [], KEY)
    deep.match([*conversation(3), Message("user", "leaves it early")], [], KEY)
    compared.clear()
    assert deep.match(conversation(TURNS), [], KEY).parent is deep[f"turn_{TURNS - 1}"]
    assert not compared


def test_the_search_for_a_break_compares_no_more_than_its_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each call that differed in its last message cost one comparison for each message of each earlier one: after
    60 calls of 6,000 messages each kept the event loop for 0.26 s."""
    compared: list[Message] = []

    def foreign(stored: Message, incoming: Message) -> Comparison:
        compared.append(incoming)
        return compare.compare_foreign(stored, incoming)

    monkeypatch.setattr(breaks, "compare_foreign", foreign)
    monkeypatch.setattr(breaks, "COMPARED_GROUPS", 1_000)
    tree, same = TokenTree(), [Message("user", "m")] * 200
    for index in range(30):
        compared.clear()
        call = [Message("user", f"{index // 28}"), *same, Message("user", f"{index}")]
        found = tree.match(call, [], KEY)
        assert len(compared) <= 1_000 + len(call)
        tree.add(make_turn(found, answer(index), seq=index, tools_key=KEY, completion_ids=[7]))
    assert broken(found) == ("new_conversation", len(call) - 1, "content")  # found among the latest


def test_system_texts_are_compared_up_to_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sixteen turns with system texts of 200,000 characters kept the event loop for 0.12 s, and as many again for
    each reply of the dialogue."""
    compared: list[str] = []

    def alike(left: str, right: str) -> bool:
        compared.append(left)
        return False

    monkeypatch.setattr(breaks, "alike", alike)
    monkeypatch.setattr(breaks, "MOST_COMPARED_CHARS", 1_000)
    tree, dialogue, reply = TokenTree(), [Message("user", "u")], Message("assistant", "ok")
    for index in range(2 * breaks.CANDIDATES):
        system = Message("system", f"{index // 2}".rjust(100, "x"))
        found = tree.match([system, *dialogue], [], KEY)
        tree.add(make_turn(found, reply, seq=index, tools_key=KEY, completion_ids=[7]))
    call = [Message("system", "y" * 100), *dialogue, reply, Message("user", "v")]
    tree.match(call, [], tools_key([make_tool("t")], "t"))
    assert len(compared) == len(set(compared)) == 6


def test_a_run_of_replies_is_merged_in_one_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Merged one after the other, 10,000 replies of 370 characters stopped the server's event loop for half a
    second, and for more than a minute, which ended the server, where one of the characters was an emoji."""
    made: list[Message] = []

    def noted(**fields: Any) -> Message:
        made.append(Message(**fields))
        return made[-1]

    monkeypatch.setattr(keys, "Message", noted)
    tree, run = TokenTree(), [Message("assistant", f"{index}", reasoning="r") for index in range(TURNS)]
    found = tree.match([Message("user", "u"), *run, TOOL, *run], [], KEY)
    assert [len(message.content) for message in made] == 2 * [sum(len(message.content) for message in run)]
    made.clear()
    node = tree.add(make_turn(found, Message("assistant", "!"), seq=0, tools_key=KEY, completion_ids=[7]))
    assert [group.end - group.start for group in node.groups] == [1, TURNS, 1, TURNS + 1]
    assert [len(message.reasoning or "") for message in made] == 2 * [TURNS]


def test_a_deep_path_is_exported_as_one_row(deep: TokenTree) -> None:
    out = export_samples(deep, FACTS)
    (sample,) = out.samples
    assert len(sample.input_ids) == 3 * TURNS
    assert sample.loss_mask.tolist() == [0, 1, 1] * TURNS
    assert [span.turn_id for span in sample.turn_spans] == [f"turn_{i}" for i in range(TURNS)]
    assert (out.stats.turns, out.stats.roots, out.stats.branches) == (TURNS, 1, 0)


def test_a_wide_forest_is_exported_row_by_row() -> None:
    tree = TokenTree()
    place = CallMatch(
        parent=None,
        new_messages=(Message("user", "u"),),
        echo=(),
        broken=None,
        request_messages=(Message("user", "u"),),
    )
    for index in range(TURNS):
        tree.add(
            make_turn(place, answer(index), seq=index, tools_key=KEY, completion_ids=[7])
        ).delivery = "written"
    out = export_samples(tree, FACTS)
    assert len(out.samples) == TURNS
    assert out.stats.trained_tokens == TURNS
