"""Sends changes of status, and notices, to the readers of ``GET /events``. A slow reader never delays the server.

What must hold: events have numbers without a gap, in the order in which they are published; a reader that says
which one it saw last is sent every later one, once, or told that some are lost. An event's id names the server's
start too, so that one of an earlier start is not taken for one of this.
"""

from __future__ import annotations

import re
import secrets
from collections import deque
from collections.abc import AsyncIterator

import anyio
from anyio.streams.memory import MemoryObjectSendStream

from turnstile.models import Episode, Notice
from turnstile_server.control.protocol import EpisodeEvent
from turnstile_server.errors import TooManyCalls

_PLACE = re.compile(r"(?P<start>[0-9a-f]{8})-(?P<number>[0-9]{1,18})")


class Broadcast:
    """At most ``readers`` at once. A reader that lags ``queue`` changes behind is cut off: its iterator ends.
    ``kept``: the latest events, for readers that come back."""

    def __init__(self, readers: int, queue: int, kept: int) -> None:
        self._readers = readers
        self._queue = queue
        self._streams: set[MemoryObjectSendStream[EpisodeEvent]] = set()
        self._start = secrets.token_hex(4)
        self._number = 0
        """Number of the latest event."""
        self._kept: deque[EpisodeEvent] = deque(maxlen=kept)

    def publish(self, episode: Episode) -> None:
        self._send(episode=episode)

    def notify(self, notice: Notice) -> None:
        """Tells all readers something that is no episode's change."""
        self._send(notice=notice)

    def lose(self, reason: str) -> None:
        """Tells all readers, those that come back later too, that changes are lost at this place."""
        self._send(lost=reason)

    def _send(
        self, *, episode: Episode | None = None, lost: str | None = None, notice: Notice | None = None
    ) -> None:
        self._number += 1
        event = EpisodeEvent(self._latest_id(), episode, lost, notice)
        self._kept.append(event)
        for stream in list(self._streams):
            try:
                stream.send_nowait(event)
            except (anyio.WouldBlock, anyio.BrokenResourceError):
                self._drop(stream)

    def subscribe(self, after: str | None = None) -> AsyncIterator[EpisodeEvent]:
        """Gives where it begins, an event without an episode, then every change from there on: after the event
        with the id ``after``, else from now on. Where events after that one are lost, ``lost`` of the first event
        says why. Raises TooManyCalls when there are ``readers`` already."""
        if len(self._streams) >= self._readers:
            raise TooManyCalls(f"{self._readers} readers follow the events already, the limit")
        missed, lost = self._missed(after)
        begun = EpisodeEvent(after if missed and after is not None else self._latest_id(), None, lost)
        send, receive = anyio.create_memory_object_stream[EpisodeEvent](self._queue)
        self._streams.add(send)

        async def changes() -> AsyncIterator[EpisodeEvent]:
            try:
                yield begun
                for event in missed:
                    yield event
                async for event in receive:
                    yield event
            finally:
                receive.close()
                self._drop(send)

        return changes()

    def close(self) -> None:
        for stream in list(self._streams):
            self._drop(stream)

    def _latest_id(self) -> str:
        return f"{self._start}-{self._number}"

    def _missed(self, after: str | None) -> tuple[list[EpisodeEvent], str | None]:
        """The events after that one, and why they are not all there."""
        if after is None:
            return [], None
        place = _PLACE.fullmatch(after)
        if place is None or place["start"] != self._start:
            return [], "the server has started since"
        count = self._number - int(place["number"])
        if not 0 <= count <= len(self._kept):
            return [], f"only the latest {len(self._kept)} events are kept"
        return list(self._kept)[len(self._kept) - count :], None

    def _drop(self, stream: MemoryObjectSendStream[EpisodeEvent]) -> None:
        self._streams.discard(stream)
        stream.close()


async def changes_of(events: AsyncIterator[EpisodeEvent]) -> AsyncIterator[Episode]:
    """The changed episodes alone, for readers that need no place to come back to."""
    async for event in events:
        if event.episode is not None:
            yield event.episode
