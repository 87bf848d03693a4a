"""Placement, as a state machine with a clock of its own."""

from __future__ import annotations

from typing import Any

import pytest

from turnstile import _placement
from turnstile._placement import ServerPool
from turnstile.models import ServerLoad


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


def load(server_id: str, *, running: int = 0, places: int = 4, **changes: Any) -> ServerLoad:
    fields: dict[str, Any] = {
        "server_id": server_id, "release": "1", "node": "here", "draining": False, "drained": False,
        "refusal": None, "open": running, "max_open": 100, "queued": 0, "running": running, "max_running": places,
        "grading": 0, "gradings_waiting": 0, "grading_places": 1, "sandboxes_in_use": None, "sandboxes_warm": None,
        "max_sandboxes": None, "memory_available_bytes": None, "memory_bytes": None,
    }  # fmt: skip
    return ServerLoad.model_validate(fields | changes)


def told(pool: ServerPool, **loads: ServerLoad) -> None:
    """One look, in which these servers answer."""
    for url, found in loads.items():
        server = pool.at(url)
        assert server is not None
        pool.told(url, found, asked=server.placed)
    pool.settle()


def state(pool: ServerPool, url: str) -> str:
    return {server.url: server.state.value for server in pool.servers}[url]


def taken(pool: ServerPool, count: int, **wanted: str) -> list[str]:
    found = []
    for _ in range(count):
        url = pool.order(**wanted)[0]
        pool.reserve(url, wanted.get("group_id"))
        pool.release(url)
        found.append(url)
    return found


def test_an_episode_goes_where_most_places_are_free_whoever_has_the_others(pool: ServerPool) -> None:
    told(pool, a=load("A", running=3), b=load("B", running=1), c=load("C", places=8, running=6))
    assert taken(pool, 6) == ["b", "c", "b", "a", "c", "b"], "those of this client are counted at once"
    told(pool, a=load("A", running=4), b=load("B", running=4), c=load("C", places=8, running=4))
    assert pool.order()[0] == "c", "an answer counts what was placed before it was asked for"


def test_a_group_stays_together_while_there_is_room(pool: ServerPool) -> None:
    told(pool, a=load("A"), b=load("B"), c=load("C"))
    assert taken(pool, 4, group_id="g") == ["a"] * 4
    assert taken(pool, 1, group_id="g") == ["b"], "the first server is full"
    assert taken(pool, 3, group_id="g") == ["b"] * 3
    assert taken(pool, 2, group_id="h") == ["c"] * 2


def test_a_task_goes_where_its_image_is_while_there_is_a_place(pool: ServerPool) -> None:
    told(pool, a=load("A"), b=load("B", running=2, images=("swe:1",)), c=load("C"))
    pool.has_image("task-1", "swe:1")
    image = pool.image_of("task-1")
    assert image is not None
    assert taken(pool, 3, image=image) == ["b", "b", "a"]
    assert pool.image_of("other") is None


def test_a_draining_or_refusing_server_gets_nothing_while_another_takes_some(pool: ServerPool) -> None:
    told(pool, a=load("A", draining=True), b=load("B", running=4), c=load("C", refusal="the disk is full"))
    assert pool.order() == ["b"]
    told(pool, b=load("B", draining=True))
    assert set(pool.order()) == {"a", "b", "c"}, "each says why"


def test_a_server_that_the_source_no_longer_names_is_gone_at_the_second_look(pool: ServerPool) -> None:
    told(pool, a=load("A"), b=load("B"), c=load("C", draining=True))
    pool.placed("e", "b", is_open=True)
    lost = pool.server_of("e")
    assert lost is not None
    for expected in (None, "b is gone: the source of the servers does not name it any more"):
        pool.name(["a"])
        told(pool, a=load("A"), c=load("C", draining=True))
        assert lost.lost == expected
    assert [server.url for server in pool.servers] == ["a", "c"], "a server that drains has episodes to end"
    pool.abandon("e")
    assert [server.abandoned for server in pool.departed] == [{"e"}]
    drained = pool.at("c")
    pool.silent("c", "refused", 1.0)
    pool.settle()
    assert [server.url for server in pool.servers] == ["a"]
    assert drained is not None
    assert drained.lost is not None


def test_a_drained_server_that_answers_no_more_has_ended_and_one_that_is_back_is_there(pool: ServerPool) -> None:
    told(pool, a=load("A", running=1, draining=True), b=load("B"), c=load("C"))
    pool.silent("a", "refused", 1.0)
    pool.settle()
    assert [server.lost for server in pool.servers] == [None] * 3, "something ran there"
    told(pool, a=load("A", draining=True), b=load("B"), c=load("C"))
    server = pool.at("a")
    assert server is not None
    pool.silent("a", "refused", 1.0)
    pool.settle()
    assert server.lost == "a has drained, and ended"
    told(pool, a=load("A"))
    assert (server.lost, state(pool, "a")) == (None, "ready")


def test_a_silent_server_is_lost_in_time_and_only_where_another_takes_its_rollouts(pool: ServerPool) -> None:
    told(pool, a=load("A"), b=load("B", refusal="full"), c=load("C", refusal="full"))
    pool.placed("e", "a", is_open=True)
    server = pool.server_of("e")
    assert server is not None
    pool.silent("a", "refused", 60.0)
    pool.settle()
    assert server.silence_s == 5.0, "the loop stood still; one look proves little"
    pool.silent("a", "refused", 60.0)
    pool.settle()
    assert server.lost is None, "nobody would take them"
    told(pool, b=load("B"))
    assert server.lost == "a has not served for 10 s: refused"
    told(pool, a=load("A"))
    assert (server.lost, server.silence_s, state(pool, "a")) == (None, 0.0, "ready")


def test_a_server_is_followed_to_another_address(pool: ServerPool) -> None:
    told(pool, a=load("A"), b=load("B"), c=load("C"))
    pool.placed("e", "b", is_open=True)
    pool.name(["a", "c", "new"])
    pool.silent("b", "refused", 1.0)
    told(pool, new=load("B"))
    assert pool.location("e") == "new"
    assert [server.url for server in pool.servers] == ["a", "c", "new"]
    pool.reserve("b")  # a creation that is still on its way to the old address
    server = pool.at("b")
    assert server is not None
    assert (server.url, server.creating, server.lost) == ("new", 1, None)
    pool.name(["a", "b", "c"])  # and back
    pool.silent("new", "refused", 1.0)
    told(pool, b=load("B"))
    assert pool.location("e") == "b"


def test_two_addresses_of_one_server_are_one_and_another_server_at_an_address_is_another(pool: ServerPool) -> None:
    told(pool, a=load("A"), b=load("A"), c=load("C"))
    assert state(pool, "b") == "refused"
    assert set(pool.order()) == {"a", "c"}
    told(pool, a=load("A"), b=load("A"), c=load("C"))
    assert (state(pool, "a"), state(pool, "b")) == ("ready", "refused")
    pool.placed("e", "c", is_open=True)
    lost = pool.server_of("e")
    told(pool, c=load("empty"))
    assert lost is not None
    assert lost.lost == "another server answers at c now (empty)"
    assert pool.server_of("e") is lost
    assert state(pool, "c") == "ready"
