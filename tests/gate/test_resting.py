"""Trees of resting episodes are packed a block at a time, and freed memory goes back when all are."""

from __future__ import annotations

import gc
import threading
import weakref

import pytest
from stepped_clock import loop_clock

from capture.long_trees import is_packed, long_tree
from turnstile.models import Sampling
from turnstile_server.capture import TokenTree
from turnstile_server.capture.packed_parts import Packing
from turnstile_server.gate.call import ModelCall
from turnstile_server.gate.episode_limits import CallLimits
from turnstile_server.gate.resting import RestingTrees
from turnstile_server.gate.session import EpisodeSession
from waiting import wait_until

pytestmark = pytest.mark.anyio

FOURS = Packing(block_turns=4)


class Trims:
    """How often freed memory was given back, and in which threads."""

    def __init__(self) -> None:
        self.threads: list[int] = []

    def trim(self) -> None:
        self.threads.append(threading.get_ident())


def always() -> bool:
    return True


def all_packed(tree: TokenTree) -> bool:
    return all(is_packed(node) for node in tree)


async def time_passes() -> None:
    with loop_clock() as clock:
        await clock.let_pass(10)


async def test_all_trees_are_packed_and_then_memory_goes_back_in_a_thread() -> None:
    trims = Trims()
    resting = RestingTrees(0.0, always, trims.trim)
    trees = [long_tree(8, FOURS) for _ in range(3)]
    for tree in trees:
        resting.add(tree)
        resting.add(tree)
    assert not any(all_packed(tree) for tree in trees), "not before the loop goes on"
    await wait_until(lambda: trims.threads)
    assert all(all_packed(tree) for tree in trees)
    assert trims.threads == trims.threads[:1] != [threading.get_ident()]
    resting.add(trees[0])
    await time_passes()
    assert len(trims.threads) == 1, "nothing more was packed"
    resting.close()


async def test_memory_goes_back_no_more_often_than_asked() -> None:
    trims = Trims()
    resting = RestingTrees(3600.0, always, trims.trim)
    for _ in range(2):
        tree = long_tree(8, FOURS)
        resting.add(tree)
        await wait_until(lambda tree=tree: all_packed(tree))
        await wait_until(lambda: trims.threads)
    await time_passes()
    assert len(trims.threads) == 1
    resting.close()


async def test_memory_goes_back_only_while_no_call_is_in_flight(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("turnstile_server.gate.resting.QUIET_S", 0.01)
    trims, calls = Trims(), {"turn_1"}
    resting = RestingTrees(0.0, lambda: not calls, trims.trim)
    resting.add(tree := long_tree(8, FOURS))
    await wait_until(lambda: all_packed(tree))
    await time_passes()
    assert trims.threads == []
    calls.clear()
    await wait_until(lambda: trims.threads)
    resting.close()


async def test_a_tree_whose_episode_goes_on_is_let_alone_and_a_closed_one_packs_nothing() -> None:
    resting = RestingTrees(0.0, always, Trims().trim)
    goes_on, rests, late = (long_tree(8, FOURS) for _ in range(3))
    resting.add(goes_on)
    resting.add(rests)
    resting.remove(goes_on)
    resting.remove(late)
    await wait_until(lambda: all_packed(rests))
    assert not any(is_packed(node) for node in goes_on)
    resting.add(late)
    resting.close()
    await time_passes()
    assert not any(is_packed(node) for node in late)


def session_of(resting: RestingTrees, warm_s: float) -> EpisodeSession:
    limits = CallLimits(99, 9, 999, 1 << 20, 2, 3)
    session = EpisodeSession("e1", Sampling(), limits, lambda error: None, warm_s=warm_s, resting=resting)
    session.tree = long_tree(8, FOURS)
    return session


async def test_a_session_without_calls_has_its_tree_packed_and_what_was_looked_at_closed() -> None:
    resting = RestingTrees(0.0, always, Trims().trim)
    session = session_of(resting, warm_s=0.01)
    session.admit(call := ModelCall("turn_1", "r", 0.0))
    session.release(call)
    await wait_until(lambda: all_packed(session.tree))
    node = next(iter(session.tree))
    looked_at = node.turn
    await wait_until(lambda: node.turn is not looked_at)
    resting.close()


async def test_a_call_keeps_the_tree_of_its_session_from_being_packed() -> None:
    resting = RestingTrees(0.0, always, Trims().trim)
    session = session_of(resting, warm_s=0.0)
    session.admit(first := ModelCall("turn_1", "r", 0.0))
    session.release(first)
    session.cool()
    session.admit(ModelCall("turn_2", "r", 0.0))
    await time_passes()
    assert not any(is_packed(node) for node in session.tree)
    resting.close()


@pytest.mark.slow
async def test_an_ended_session_is_kept_by_no_timer_and_its_tree_rests_where_somebody_keeps_it() -> None:
    resting = RestingTrees(0.0, always, Trims().trim)
    kept, dropped = session_of(resting, warm_s=0.05), session_of(resting, warm_s=3600.0)
    for session in (kept, dropped):
        session.admit(call := ModelCall("turn_1", "r", 0.0))
        session.release(call)
        session.end()
    tree = kept.tree
    gone: list[weakref.ref[object]] = [weakref.ref(kept), weakref.ref(dropped), weakref.ref(dropped.tree)]
    del kept, dropped, session
    gc.collect()
    assert [each() for each in gone] == [None] * 3
    await wait_until(lambda: all_packed(tree))
    resting.close()
