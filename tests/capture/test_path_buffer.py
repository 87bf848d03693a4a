"""Tokens of growing and branching paths in shared buffers: always those of the path, and never changed
afterwards."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from capture.play import Play
from turnstile.models import Int32Array
from turnstile_server.capture.node import Node
from turnstile_server.capture.path_buffer import PathBuffer

# Few different tokens, so that branches often begin alike.
IDS = st.lists(st.integers(0, 1), max_size=4)


def array(ids: list[int]) -> Int32Array:
    return np.array(ids, np.int32)


@given(
    IDS,
    st.lists(st.tuples(st.integers(0, 30), st.lists(IDS, max_size=3)), max_size=30),
    st.integers(0, 12),
)
def test_what_a_buffer_gives_is_what_was_asked_and_stays_so(
    first: list[int], asked: list[tuple[int, list[list[int]]]], room: int
) -> None:
    buffer = PathBuffer([array(first)])
    buffer._ids = buffer._ids[: len(first) + room]  # so that it is full soon
    given_out: list[tuple[Int32Array, list[int]]] = [(array(first), first)]
    for index, parts in asked:
        start = given_out[index % len(given_out)][1]
        wanted = start + [token for part in parts for token in part]
        found = buffer.extended(len(start), [array(part) for part in parts])
        if found is not None:
            assert (found.dtype, found.tolist(), found.flags.writeable) == (np.int32, wanted, False)
            given_out.append((found, wanted))
        else:
            written = buffer._ids[: buffer._used].tolist()
            differs = written[: len(wanted)] != wanted[: len(written)]
            assert differs or len(wanted) > len(buffer._ids)
        for view, before in given_out:
            assert view.tolist() == before


@given(st.lists(IDS, max_size=6), IDS)
def test_a_buffer_begins_with_its_parts(parts: list[list[int]], more: list[int]) -> None:
    buffer = PathBuffer([array(part) for part in parts])
    first = [token for part in parts for token in part]
    begun, longer = buffer.first(len(first)), buffer.extended(len(first), [array(more)])
    assert (begun.dtype, begun.tolist(), begun.flags.writeable) == (np.int32, first, False)
    assert longer is not None
    assert longer.tolist() == first + more
    assert buffer.first(len(first)).tolist() == first


def test_a_path_that_grows_stays_in_its_buffer() -> None:
    buffer, path = PathBuffer([array([1, 2])]), [1, 2]
    for turn in range(20):
        prompt = buffer.extended(len(path), [array([turn])])
        whole = buffer.extended(len(path), [array([turn]), array([7, 8])])
        assert prompt is not None
        assert whole is not None
        assert np.shares_memory(prompt, whole)
        path += [turn, 7, 8]
        assert whole.tolist() == path


def test_branches_that_threads_write_at_once_do_not_mix() -> None:
    for _ in range(50):
        buffer = PathBuffer([array([0] * 100)])
        with ThreadPoolExecutor(8) as threads:
            branches = [[array([token] * 500)] for token in range(8)]
            found = list(threads.map(partial(buffer.extended, 100), branches))
        given_out = [ids for ids in found if ids is not None]
        assert len(given_out) == 1
        assert len(set(given_out[0][100:].tolist())) == 1


def test_a_call_that_leaves_a_path_before_its_end_takes_its_tokens_from_there_and_is_copied_once() -> None:
    play, asked = Play(), "user:u0"
    nodes = [play.turn(asked, "a0")]
    for index in range(1, 6):
        asked += f" assistant:a{index - 1} user:u{index}"
        nodes.append(play.turn(asked, f"a{index}"))
    whole = nodes[-1].tokens()
    assert np.shares_memory(nodes[2].tokens(), whole)

    asked = "user:u0 assistant:a0 user:u1 assistant:a1 user:u2 assistant:a2 user:other"
    match = play.match(asked)
    assert match.parent is nodes[2]
    token = play.token("user:other")
    prompt = nodes[2].extended(array([token]))
    assert prompt.tolist() == [*nodes[2].tokens().tolist(), token]
    assert whole.tolist() == nodes[-1].tokens().tolist()
    child = play.turn(asked, "b", match=match)
    assert child.tokens()[: len(prompt)].tolist() == prompt.tolist()
    assert np.shares_memory(child.tokens(), prompt)
    assert np.shares_memory(child.extended(array([token])), prompt)


def test_calls_from_one_turn_at_the_same_time_have_tokens_of_their_own() -> None:
    play, words = Play(), ("x", "y", "z")
    first = play.turn("user:u", "a")
    prompts = [first.extended(array([play.token(f"user:{word}")])) for word in words]
    nodes = [play.turn(f"user:u assistant:a user:{word}", "b") for word in words]
    for prompt, node in zip(prompts, nodes, strict=True):
        assert prompt[:-1].tolist() == first.tokens().tolist()
        assert node.tokens()[: len(prompt)].tolist() == prompt.tolist()
        node.cool()
        assert node.tokens()[: len(prompt)].tolist() == prompt.tolist()
    assert len({prompt.tobytes() for prompt in prompts}) == len(words)


def test_a_path_that_is_read_turn_by_turn_is_not_searched_downwards_for_each(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    searched: list[Node] = []
    search = Node._buffer_below

    def counted(node: Node) -> PathBuffer | None:
        searched.append(node)
        return search(node)

    monkeypatch.setattr(Node, "_buffer_below", counted)
    play, asked = Play(), "user:u0"
    nodes = [play.turn(asked, "a0")]
    for index in range(1, 6):
        asked += f" assistant:a{index - 1} user:u{index}"
        nodes.append(play.turn(asked, f"a{index}"))
    lengths = [len(node.tokens()) for node in nodes]
    assert lengths == [node.token_count for node in nodes]
    assert searched == nodes[:1]
