"""New episodes go to the least busy worker, and names that belong together to one worker."""

from __future__ import annotations

from collections import Counter
from contextlib import ExitStack

import pytest
from hypothesis import given
from hypothesis import strategies as st

from turnstile_server.workers.ownership import Ownership
from turnstile_server.workers.placement import LeastBusy


def told(placement: LeastBusy, *open_: int) -> None:
    for number, count in enumerate(open_):
        placement.told(number, count, None, held=False, asked=placement.loads[number].placed)


def place(placement: LeastBusy) -> int:
    number = placement.choose()
    placement.placed(number)
    return number


@given(st.integers(1, 8), st.integers(0, 40))
def test_a_burst_between_two_looks_is_spread_evenly(workers: int, episodes: int) -> None:
    placement = LeastBusy(range(workers))
    told(placement, *[0] * workers)
    counts = Counter(place(placement) for _ in range(episodes))
    assert max(counts.values(), default=0) - min((counts[each] for each in range(workers)), default=0) <= 1


@given(st.lists(st.integers(0, 20), min_size=1, max_size=6), st.integers(1, 30))
def test_the_fullest_worker_is_given_nothing_while_another_has_fewer(open_: list[int], episodes: int) -> None:
    placement = LeastBusy(range(len(open_)))
    told(placement, *open_)
    for _ in range(episodes):
        busy = {number: load.busy for number, load in placement.loads.items()}
        assert busy[place(placement)] == min(busy.values())


def test_what_was_placed_before_the_look_is_in_its_answer_and_counts_once() -> None:
    placement = LeastBusy([0, 1])
    told(placement, 0, 0)
    first = place(placement)
    asked = placement.loads[first].placed
    while place(placement) != first:
        continue
    placement.told(first, 1, None, held=False, asked=asked)
    assert placement.loads[first].busy == 2, "the one that came after the question is not in the answer"


def test_a_worker_that_refuses_or_is_silent_is_left_out_until_none_is_left() -> None:
    placement = LeastBusy([0, 1, 2])
    told(placement, 5, 0, 0)
    placement.told(1, 0, "the disk is full", held=False, asked=0)
    placement.silent(2)
    assert {place(placement) for _ in range(6)} == {0}
    placement.silent(0)
    assert place(placement) in (0, 1, 2)


def test_what_is_being_created_counts_although_a_look_comes_between() -> None:
    placement = LeastBusy([0, 1])
    told(placement, 0, 0)
    first = placement.choose()
    with placement.placing(first):
        told(placement, 0, 0)  # the worker does not have it yet
        assert placement.choose() != first
    assert placement.loads[first].busy == 1
    told(placement, *(1 if number == first else 0 for number in (0, 1)))
    assert placement.loads[first].busy == 1, "it is in the answer now"


def test_names_belong_to_a_worker_while_a_creation_runs_and_are_free_when_it_failed() -> None:
    owners = Ownership()
    with owners.promised(1, ["ep_a"], "group", "key"):
        assert (owners.of("ep_a"), owners.of_group("group"), owners.of_key("key")) == (1, 1, 1)
    assert (owners.of("ep_a"), owners.of_group("group")) == (None, None)
    assert owners.of_key("key") == 1, "the request is repeated with its key: it may have had its effect"


def test_a_group_of_two_creations_stays_promised_until_the_last_one_is_over() -> None:
    owners = Ownership()
    with ExitStack() as outer:
        outer.enter_context(owners.promised(0, [], "group", None))
        with pytest.raises(RuntimeError), owners.promised(0, [], "group", None):
            raise RuntimeError
        assert owners.of_group("group") == 0
    assert owners.of_group("group") is None


def test_what_a_creation_made_stays_the_workers_and_a_group_stays_with_its_first() -> None:
    owners = Ownership()
    with owners.promised(1, [], "group", None):
        owners.learn(1, "ep_a", "group", "key")
    owners.learn(0, "ep_b", "group")
    assert (owners.of("ep_a"), owners.of("ep_b"), owners.of_group("group")) == (1, 0, 1)
    owners.forget("ep_a")
    assert owners.of("ep_a") is None
