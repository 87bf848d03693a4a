"""Readers of events that come back: they are sent what they missed, once, or told that it is lost."""

from __future__ import annotations

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from turnstile.models import Episode, EpisodeStatus, EpisodeTimings, Limits, Sampling, TaskRef
from turnstile_server.control.protocol import EpisodeEvent
from turnstile_server.episodes.broadcast import Broadcast

pytestmark = [pytest.mark.anyio, pytest.mark.slow]


def change(number: int) -> Episode:
    return Episode(
        episode_id=f"ep_{number}",
        status=EpisodeStatus.RUNNING,
        agent="external",
        task=TaskRef(instruction="say hello"),
        rollout_id="ep",
        sampling=Sampling(),
        limits=Limits(),
        timings=EpisodeTimings(created_at=0.0),
    )


async def read(broadcast: Broadcast, after: str | None, live: int = 0) -> list[EpisodeEvent]:
    """What a reader is sent until nothing is left, ``live`` events being published once it has begun."""
    found = []
    reader = broadcast.subscribe(after)
    with anyio.move_on_after(0.05):
        found.append(await anext(reader))
        for number in range(live):
            broadcast.publish(change(1000 + number))
        async for event in reader:
            found.append(event)
    return found


def ids(events: list[EpisodeEvent]) -> list[str]:
    return [event.episode.episode_id for event in events if event.episode is not None]


@given(published=st.integers(0, 9), seen=st.integers(0, 9), kept=st.integers(0, 9))
def test_a_reader_is_sent_every_later_event_once_or_told_that_some_are_lost(
    published: int, seen: int, kept: int
) -> None:
    async def check() -> None:
        broadcast = Broadcast(readers=4, queue=10, kept=kept)
        (start,) = await read(broadcast, None)
        places = [start.event_id]
        for number in range(published):
            broadcast.publish(change(number))
            (place,) = await read(broadcast, None)
            places.append(place.event_id)
        if seen > published:
            return
        found = await read(broadcast, places[seen], live=2)
        if published - seen <= kept:
            missed = [f"ep_{number}" for number in range(seen, published)]
            assert ids(found) == [*missed, "ep_1000", "ep_1001"]
            assert found[0] == EpisodeEvent(places[seen], None)
        else:
            assert found[0].lost is not None
            assert "events are kept" in found[0].lost
            assert ids(found) == ["ep_1000", "ep_1001"]

    anyio.run(check)


@pytest.mark.parametrize(
    "after",
    ["", "x", "0-1", "{start}-", "{start}-x", "{start}--1", "{start}-²", "{start}-99", "{start}-" + 5000 * "9"],
)
async def test_an_id_that_is_none_of_this_start_is_told_that_events_are_lost(after: str) -> None:
    broadcast = Broadcast(readers=1, queue=10, kept=10)
    broadcast.publish(change(0))
    (place,) = await read(broadcast, None)
    found = await read(broadcast, after.format(start=place.event_id.partition("-")[0]))
    assert [event.event_id for event in found] == [place.event_id]
    assert found[0].lost
