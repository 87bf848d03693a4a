"""The events of several workers as one stream, read byte by byte."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from turnstile.models import Notice
from turnstile_server.episodes.broadcast import Broadcast
from turnstile_server.workers.events import ServerSentEvent, read_events

pytestmark = pytest.mark.anyio

STREAM = (
    b': open\n\nid: a-1\n\n: \n\nid: a-2\nevent: episode\ndata: {"x":\ndata: 1}\n\nid: a-3\r\nevent: reset\r\n'
    b"data: {}\r\n\r\nid: a-4\nevent: episode\ndata: unfinished"
)


async def lines(stream: bytes) -> AsyncIterator[bytes]:
    for line in stream.splitlines(keepends=True):
        yield line


async def read(stream: bytes) -> list[ServerSentEvent]:
    return [event async for event in read_events(lines(stream))]


async def test_events_have_their_names_their_data_and_their_places() -> None:
    found = [(event.event_id, event.name, event.data) for event in await read(STREAM)]
    assert found == [("a-1", "", b""), ("a-2", "episode", b'{"x":\n1}'), ("a-3", "reset", b"{}")]


async def test_a_reader_that_follows_and_one_that_comes_back_are_told_of_a_loss() -> None:
    broadcast = Broadcast(4, 10, 10)
    following = broadcast.subscribe()
    begun = await anext(following)
    broadcast.lose("worker 1 was started again")
    assert (await anext(following)).lost == "worker 1 was started again"
    back = broadcast.subscribe(begun.event_id)
    assert (await anext(back)).event_id == begun.event_id
    assert (await anext(back)).lost == "worker 1 was started again"
    broadcast.close()


async def test_a_notice_is_sent_and_kept_like_a_change() -> None:
    broadcast, notice = Broadcast(4, 10, 10), Notice(type="retention", message="room was made", at=1.0)
    following = broadcast.subscribe()
    begun = await anext(following)
    broadcast.notify(notice)
    assert (await anext(following)).notice == notice
    back = broadcast.subscribe(begun.event_id)
    assert [(await anext(back)).notice, (await anext(back)).notice] == [None, notice]
    broadcast.close()


@given(st.binary(max_size=300))
async def test_no_stream_breaks_the_reader(stream: bytes) -> None:
    for event in await read(stream):
        assert event.event_id is not None or event.data
