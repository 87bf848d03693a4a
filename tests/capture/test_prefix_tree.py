"""A tree of token sequences holds every shared beginning once, and every sequence exactly."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from turnstile_server.capture.prefix_tree import prefix_tree

sequences = st.lists(st.lists(st.integers(0, 2), max_size=8), max_size=8)


@given(sequences)
def test_every_sequence_is_the_tokens_on_its_path_and_no_beginning_is_there_twice(rows: list[list[int]]) -> None:
    nodes = prefix_tree([np.array(row, np.int32) for row in rows])
    for index, row in enumerate(rows):
        path = [node for node in nodes if index in node.sequences]
        assert [token for node in path for token in row[node.start : node.end]] == row
        assert [index in node.ends for node in path] == [False] * (len(path) - 1) + [True] * bool(row)
        for node, after in pairwise(path):
            assert nodes[after.parent] is node
        assert not path or path[0].parent == -1
    for node in nodes:
        assert node.start < node.end
        assert set(node.ends) <= set(node.sequences)
        assert len({tuple(rows[each][node.start : node.end]) for each in node.sequences}) == 1
    starts = [(node.parent, rows[node.sequences[0]][node.start]) for node in nodes]
    assert len(set(starts)) == len(starts)  # siblings begin with different tokens
    parents = [node.parent for node in nodes]
    assert all(parent < index for index, parent in enumerate(parents))
    for index, node in enumerate(nodes):  # a node with one child that nothing ends at would be one node with it
        assert node.ends or parents.count(index) != 1


def test_siblings_are_in_the_order_of_their_earliest_sequence() -> None:
    nodes = prefix_tree([np.array(row, np.int32) for row in ([5, 1], [5, 9, 9], [7], [5, 1, 1])])
    assert [(node.parent, node.start, node.end, node.sequences, node.ends) for node in nodes] == [
        (-1, 0, 1, (0, 1, 3), ()),
        (0, 1, 2, (0, 3), (0,)),
        (1, 2, 3, (3,), (3,)),
        (0, 1, 3, (1,), (1,)),
        (-1, 0, 1, (2,), (2,)),
    ]
