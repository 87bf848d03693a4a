"""The event stream and a reader that takes nothing."""

from __future__ import annotations

from collections.abc import AsyncIterator

import anyio
import pytest
from starlette.types import Message

from turnstile.models import Episode, EpisodeStatus, EpisodeTimings, Limits, Sampling, TaskRef
from turnstile_server.control.events import EventStream
from turnstile_server.control.protocol import EpisodeEvent
from waiting import PATIENCE_S

pytestmark = pytest.mark.anyio

EPISODE = Episode(
    episode_id="ep_1",
    status=EpisodeStatus.RUNNING,
    agent="external",
    task=TaskRef(instruction="say hello"),
    rollout_id="ep_1",
    sampling=Sampling(),
    limits=Limits(),
    timings=EpisodeTimings(created_at=0.0),
)


class Reader:
    """One side of an HTTP connection: takes ``takes`` messages, then none; hangs up when told."""

    def __init__(self, takes: int) -> None:
        self.takes = takes
        self.got: list[Message] = []
        self.left = anyio.Event()

    async def send(self, message: Message) -> None:
        if len(self.got) == self.takes:
            await anyio.sleep_forever()
        self.got.append(message)

    async def receive(self) -> Message:
        await self.left.wait()
        return {"type": "http.disconnect"}


class Subscription:
    """Gives ``count`` events and then waits; knows whether it was closed."""

    def __init__(self, count: int, then_end: bool = False) -> None:
        self.count, self.then_end, self.closed = count, then_end, False

    async def events(self) -> AsyncIterator[EpisodeEvent]:
        try:
            for _ in range(self.count):
                yield EpisodeEvent("a-1", EPISODE)
            if not self.then_end:
                await anyio.sleep_forever()
        finally:
            self.closed = True


async def run_stream(subscription: Subscription, reader: Reader, closing: anyio.Event | None = None) -> None:
    stream = EventStream(
        subscription.events(), closing=closing or anyio.Event(), heartbeat_s=30, send_timeout_s=0.05
    )
    with anyio.fail_after(PATIENCE_S):
        await stream({"type": "http"}, reader.receive, reader.send)


async def test_a_reader_that_takes_nothing_is_dropped_and_its_subscription_closed() -> None:
    subscription, reader = Subscription(100), Reader(takes=4)
    await run_stream(subscription, reader)
    assert subscription.closed
    assert len(reader.got) == 4
    assert all(message.get("more_body", True) for message in reader.got)  # cut off, not ended


async def test_a_reader_that_leaves_closes_its_subscription() -> None:
    subscription, reader = Subscription(3), Reader(takes=100)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(run_stream, subscription, reader)
        await anyio.wait_all_tasks_blocked()
        reader.left.set()
    assert subscription.closed
    assert sum(b"event: episode" in message.get("body", b"") for message in reader.got) == 3


async def test_a_stream_ends_with_its_subscription() -> None:
    subscription, reader = Subscription(2, then_end=True), Reader(takes=100)
    await run_stream(subscription, reader)
    assert subscription.closed
    assert reader.got[-1] == {"type": "http.response.body", "body": b"", "more_body": False}


async def test_a_stream_ends_in_order_when_the_server_closes() -> None:
    subscription, reader, closing = Subscription(2), Reader(takes=100), anyio.Event()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(run_stream, subscription, reader, closing)
        await anyio.wait_all_tasks_blocked()
        closing.set()
    assert subscription.closed
    assert reader.got[-1] == {"type": "http.response.body", "body": b"", "more_body": False}
