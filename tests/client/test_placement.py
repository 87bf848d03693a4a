"""Placement, as a state machine with a clock of its own."""

from __future__ import annotations

import pytest

from turnstile import _placement
from turnstile._placement import ServerPool


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def pool(clock: Clock) -> ServerPool:
    return ServerPool(["a", "b", "c"], down_s=5.0, clock=clock)


def test_equally_loaded_servers_take_turns(pool: ServerPool) -> None:
    taken = []
    for _ in range(6):
        url = pool.order()[0]
        pool.reserve(url)
        pool.release(url)
        taken.append(url)
    assert taken == ["a", "b", "c", "a", "b", "c"]


def test_a_creation_on_its_way_counts_as_open(pool: ServerPool) -> None:
    pool.reserve("a")
    pool.reserve("b")
    assert pool.order()[0] == "c"
    pool.reserve("c")
    pool.release("b")
    assert pool.order()[0] == "b"


def test_open_episodes_count_until_they_end_or_are_deleted(pool: ServerPool) -> None:
    for url in "abc":
        pool.placed(f"{url}1", url, is_open=True)
        pool.placed(f"{url}2", url, is_open=True)
    pool.placed("b1", "b", is_open=False)
    assert pool.order()[0] == "b"
    pool.forget("c1")
    pool.forget("c2")
    assert pool.order()[0] == "c"
    pool.forget("unknown")


def test_a_server_that_is_down_is_asked_last_until_its_time_has_passed(pool: ServerPool, clock: Clock) -> None:
    pool.unreachable("a")
    assert pool.order() == ["b", "c", "a"]
    clock.now = 5.0
    assert pool.order()[0] == "a"
    pool.unreachable("a")
    pool.reached("a")
    assert pool.order()[0] == "a"


def test_an_episode_stays_where_it_was_placed(pool: ServerPool) -> None:
    pool.placed("e", "b", is_open=True)
    assert pool.location("e") == "b"
    assert pool.location("other") is None
    assert ServerPool(["only"], down_s=1, clock=Clock()).location("other") == "only"


def test_remembered_places_are_bounded(pool: ServerPool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_placement, "MAX_LOCATIONS", 2)
    for name in ("e1", "e2", "e3"):
        pool.placed(name, "a", is_open=False)
    assert [pool.location(name) for name in ("e1", "e2", "e3")] == [None, "a", "a"]
