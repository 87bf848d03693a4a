"""The queue for places: order, fairness, and that no place is lost."""

from __future__ import annotations

import asyncio
import random

import anyio
import anyio.abc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from turnstile_server.episodes.places import PlaceClaim, Places

pytestmark = pytest.mark.anyio


class Queue:
    """One place, taken; ``given`` lists the waiters by name in the order in which they got it."""

    def __init__(self, places: Places, tasks: anyio.abc.TaskGroup) -> None:
        self.places, self.tasks = places, tasks
        self.given: list[str] = []

    async def come(self, name: str, priority: int = 0, group_since: float = 0.0) -> None:
        async def wait() -> None:
            await self.places.acquire(PlaceClaim(priority, group_since))
            self.given.append(name)

        self.tasks.start_soon(wait)
        await anyio.wait_all_tasks_blocked()

    async def free(self, times: int) -> list[str]:
        for _ in range(times):
            self.places.release()
            await anyio.wait_all_tasks_blocked()
        return self.given


async def _queued(claims: list[tuple[str, int, float]], oldest_every: int = 1000) -> list[str]:
    places = Places(1, oldest_every)
    await places.acquire(PlaceClaim())
    async with anyio.create_task_group() as tasks:
        queue = Queue(places, tasks)
        for name, priority, since in claims:
            await queue.come(name, priority, since)
        return list(await queue.free(len(claims)))


async def test_a_higher_priority_goes_first() -> None:
    assert await _queued([("a", 0, 0), ("b", 5, 0), ("c", -1, 0), ("d", 5, 0)]) == ["b", "d", "a", "c"]


async def test_within_a_priority_the_older_group_goes_first_and_then_the_earlier_arrival() -> None:
    claims = [("new", 0, 9.0), ("old", 0, 1.0), ("middle", 0, 5.0), ("old too", 0, 1.0)]
    assert await _queued(claims) == ["old", "old too", "middle", "new"]


async def test_the_one_that_waits_longest_gets_one_of_every_few_places_however_low_its_priority() -> None:
    places = Places(1, oldest_every=4)
    await places.acquire(PlaceClaim())
    async with anyio.create_task_group() as tasks:
        queue = Queue(places, tasks)
        await queue.come("training", priority=0)
        for number in range(12):  # there is always one of a higher priority
            await queue.come(f"evaluation {number}", priority=10)
            await queue.free(1)
            if "training" in queue.given:
                break
        assert queue.given.index("training") == 3
        await queue.free(places.waiting)


async def test_with_one_of_one_the_queue_is_first_come_first_served() -> None:
    names = ["a", "b", "c", "d"]
    assert await _queued([(name, number, -number) for number, name in enumerate(names)], oldest_every=1) == names


@pytest.mark.parametrize("when", ["before it is given", "in the moment in which it is given"])
async def test_the_place_of_a_waiter_that_stops_goes_to_the_next(when: str) -> None:
    places = Places(1, 8)
    await places.acquire(PlaceClaim())
    first, second = (asyncio.create_task(places.acquire(PlaceClaim())) for _ in range(2))
    await anyio.wait_all_tasks_blocked()
    if when == "before it is given":
        first.cancel()
        await anyio.wait_all_tasks_blocked()
        places.release()
    else:
        places.release()
        first.cancel()  # it was called, and has not run since
    with anyio.fail_after(10):
        await second
    assert first.cancelled()
    assert places.waiting == 0


async def test_so_many_go_on_without_their_place_and_no_more() -> None:
    places = Places(2, 8, beyond=1)
    for _ in range(2):
        await places.acquire(PlaceClaim())
    waiting = [asyncio.create_task(places.acquire(PlaceClaim())) for _ in range(2)]
    await asyncio.sleep(0)
    assert (places.leave(), places.leave()) == (True, False)
    await waiting[0]
    assert places.waiting == 1
    places.end()
    assert places.leave()
    await waiting[1]


@given(seed=st.integers(0, 10_000), count=st.integers(1, 4), oldest_every=st.integers(1, 5))
async def test_no_place_is_lost_or_given_twice_whoever_stops_when(
    seed: int, count: int, oldest_every: int
) -> None:
    pick = random.Random(seed)
    places, held, most = Places(count, oldest_every), 0, 0

    async def episode() -> None:
        nonlocal held, most
        with anyio.move_on_after(pick.choice([0, 0.0005, 1])):
            await places.acquire(PlaceClaim(pick.randrange(3), pick.random()))
            held += 1
            most = max(most, held)
            try:
                await anyio.sleep(pick.choice([0, 0, 0.0002]))
            finally:
                held -= 1
                places.release()

    async with anyio.create_task_group() as tasks:
        for _ in range(20):
            tasks.start_soon(episode)
    assert (held, places.waiting) == (0, 0)
    assert most <= count
    with anyio.fail_after(5):  # all of them are free again, and no more
        for _ in range(count):
            await places.acquire(PlaceClaim())
    with anyio.move_on_after(0.001) as too_many:
        await places.acquire(PlaceClaim())
    assert too_many.cancelled_caught
