"""What was packed comes out as it went in: in every field, in the stored bytes, and for whoever looks at it."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from capture.long_trees import is_packed, long_tree
from capture.turn_fields import turn_fields
from turnstile.models import EpisodeStatus, Message, Turn
from turnstile_server.capture import EpisodeFacts, TokenTree, export_samples
from turnstile_server.capture.keys import PathKeys, group
from turnstile_server.capture.packed_parts import NodeParts, OpenBlocks, PackedParts, Packing
from turnstile_server.journal.records import turn_record
from turnstile_server.journal.segments import encode, record_header

FACTS = EpisodeFacts(episode_id="ep_1", rollout_id="ep_1", status=EpisodeStatus.COMPLETED, reward=1.0)
EXPERTS = st.none() | st.sampled_from([np.uint8, np.uint16])


@st.composite
def turns(draw: st.DrawFn) -> Turn:
    fields = draw(turn_fields())
    dtype = draw(EXPERTS)
    if dtype is not None:
        shape = (len(fields["completion_ids"]) + draw(st.integers(0, 2)), 2, draw(st.integers(1, 3)))
        fields["routed_experts"] = np.arange(np.prod(shape), dtype=np.int64).astype(dtype).reshape(shape)
    return Turn(**fields)


def parts_of(turn: Turn) -> NodeParts:
    return NodeParts(turn, tuple(group((*turn.new_messages, turn.reply))), PathKeys(b"full", b"dialogue"))


def stored(turn: Turn) -> bytes:
    encoded = encode(turn_record(turn))
    return b"".join([record_header(encoded), *encoded.parts])


@given(st.lists(turns(), min_size=1, max_size=4))
def test_what_was_packed_comes_out_as_it_went_in(some: list[Turn]) -> None:
    parts = [parts_of(turn) for turn in some]
    found = PackedParts(parts).unpacked()
    assert len(found) == len(parts)
    for ours, theirs in zip(found, parts, strict=True):
        assert (ours.groups, ours.head) == (theirs.groups, theirs.head)
        assert list(ours.turn.__dict__) == list(theirs.turn.__dict__), "the order in which they are written"
        assert ours.turn.model_fields_set == theirs.turn.model_fields_set
        for name, value in theirs.turn.__dict__.items():
            own = ours.turn.__dict__[name]
            assert type(own) is type(value)
            if isinstance(value, np.ndarray):
                assert (own.dtype, own.shape, own.tobytes()) == (value.dtype, value.shape, value.tobytes())
                assert not own.flags.writeable
            else:
                assert repr(own) == repr(value)  # a NaN is not equal to itself
        assert stored(ours.turn) == stored(theirs.turn)


def test_text_that_has_no_utf_8_and_numbers_that_json_has_not_are_kept() -> None:
    turn = next(iter(long_tree(1))).turn.model_copy(
        update={"reply": Message("assistant", "\ud800"), "asked_sampling": {"a": float("inf"), "b": 2**100}}
    )
    (found,) = PackedParts([parts_of(turn)]).unpacked()
    assert found.turn.reply == turn.reply
    assert found.turn.asked_sampling == {"a": float("inf"), "b": 2**100}


def packed(tree: TokenTree) -> int:
    """Packs what it can; the blocks."""
    blocks = 0
    while tree.pack():
        blocks += 1
    return blocks


def test_a_packed_tree_is_exported_and_continued_as_one_that_is_not() -> None:
    tree, other = long_tree(40), long_tree(40, Packing(block_turns=4, open_blocks=2))
    other.cool()
    assert packed(other) == 10
    assert not other.pack(), "there is nothing left"
    ours, theirs = export_samples(other, FACTS), export_samples(tree, FACTS)
    assert ours.model_dump_json() == theirs.model_dump_json()
    assert [stored(node.turn) for node in other] == [stored(node.turn) for node in tree]
    assert [stored(node.turn) for node in other.snapshot()] == [stored(node.turn) for node in tree]
    history = [message for node in tree for message in (*node.turn.new_messages, node.turn.reply)]
    found, known = (each.match([*history, Message("user", "on")], (), "tools") for each in (other, tree))
    assert found.parent is other.newest
    assert (found.echo, found.broken, found.new_messages) == (known.echo, known.broken, known.new_messages)
    end = other.newest
    assert end is not None
    assert end.tokens().tolist() == tree["turn_39"].tokens().tolist()


def test_few_turns_stay_until_there_is_a_block_of_them_and_large_ones_for_good() -> None:
    few = long_tree(3, Packing(block_turns=4))
    assert not few.pack()
    assert [is_packed(node) for node in few] == [False] * 3
    one = next(iter(few)).parts.size
    assert packed(long_tree(3, Packing(block_turns=4, block_bytes=one))) == 3
    large = long_tree(9, Packing(block_turns=4, most_bytes=one - 1))
    assert packed(large) == 0
    assert not any(is_packed(node) for node in large)


def test_blocks_that_were_opened_stay_open_until_others_are_or_the_tree_cools() -> None:
    tree = long_tree(16, Packing(block_turns=4, open_blocks=2))
    packed(tree)
    nodes = list(tree)
    first = nodes[0].turn
    assert nodes[0].turn is first
    assert nodes[4].turn is not None
    assert nodes[0].turn is first, "two blocks are open"
    assert nodes[8].turn is not None
    assert nodes[0].turn is not first
    again = nodes[0].turn
    tree.cool()
    assert nodes[0].turn is not again
    assert stored(nodes[0].turn) == stored(first)


def test_a_block_takes_far_less_than_its_turns() -> None:
    parts = [node.parts for node in long_tree(16)]
    assert PackedParts(parts).size < sum(part.size for part in parts) / 2


def test_a_block_that_another_thread_closed_is_opened_again() -> None:
    blocks, block = OpenBlocks(1), PackedParts([next(iter(long_tree(1))).parts])
    opened = blocks.parts(block)
    assert block.opened is opened
    blocks.close()
    blocks.close()
    assert block.opened is None
    assert stored(blocks.parts(block)[0].turn) == stored(opened[0].turn)
