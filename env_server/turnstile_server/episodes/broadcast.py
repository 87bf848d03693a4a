"""Sends changes of status to the readers of ``GET /events``. A slow reader never delays the server."""

from __future__ import annotations

from collections.abc import AsyncIterator

import anyio
from anyio.streams.memory import MemoryObjectSendStream

from turnstile.models import Episode
from turnstile_server.errors import TooManyCalls


class Broadcast:
    """At most ``readers`` at once. A reader that lags ``queue`` changes behind is cut off: its iterator ends."""

    def __init__(self, readers: int, queue: int) -> None:
        self._readers = readers
        self._queue = queue
        self._streams: set[MemoryObjectSendStream[Episode]] = set()

    def publish(self, episode: Episode) -> None:
        for stream in list(self._streams):
            try:
                stream.send_nowait(episode)
            except (anyio.WouldBlock, anyio.BrokenResourceError):
                self._drop(stream)

    def subscribe(self) -> AsyncIterator[Episode]:
        """Gives every change from now on. Raises TooManyCalls when there are ``readers`` already."""
        if len(self._streams) >= self._readers:
            raise TooManyCalls(
                f"{self._readers} readers follow the events already, the limit (episodes.max_subscribers)"
            )
        send, receive = anyio.create_memory_object_stream[Episode](self._queue)
        self._streams.add(send)

        async def changes() -> AsyncIterator[Episode]:
            try:
                async for episode in receive:
                    yield episode
            finally:
                receive.close()
                self._drop(send)

        return changes()

    def close(self) -> None:
        for stream in list(self._streams):
            self._drop(stream)

    def _drop(self, stream: MemoryObjectSendStream[Episode]) -> None:
        self._streams.discard(stream)
        stream.close()
