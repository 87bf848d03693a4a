"""Reads what clients send in parts, so that no connection holds the event loop for long.

One read of a socket may bring 256 KiB: 40,000 chunks of a byte each, or as many WebSocket frames. A protocol takes
microseconds for each, which adds up to tenths of a second. Holds: what came at once is fed to the protocol in
parts of a few KiB; the parts of all connections of a listener together get ``PARTS_S`` of the event loop, then it
turns to others; nothing more is read of a socket while parts of it wait.

It is written on asyncio, whose transports uvicorn's protocols need.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable

from uvicorn.protocols.http.flow_control import FlowControl

PARTS_S = 0.002
"""Time for the parts of all connections, until the event loop turns to others."""


class PartQueue:
    """Whose next part is read, one after the other."""

    def __init__(self) -> None:
        self._waiting: deque[Callable[[], None]] = deque()
        self._planned = False

    def add(self, read_part: Callable[[], None]) -> None:
        self._waiting.append(read_part)
        self._plan()

    def _plan(self) -> None:
        if not self._planned:
            self._planned = True
            asyncio.get_running_loop().call_soon(self._run)

    def _run(self) -> None:
        self._planned = False
        until = time.perf_counter() + PARTS_S
        try:
            while self._waiting and time.perf_counter() < until:
                self._waiting.popleft()()
        finally:
            if self._waiting:
                self._plan()


class PartedInput:
    """The input that one connection received and its protocol did not get yet.

    ``size``: bytes of the next part. ``feed`` hands a part to the protocol; ``takes_more`` says whether it wants
    another.
    """

    def __init__(
        self,
        transport: asyncio.Transport,
        queue: PartQueue,
        size: Callable[[], int],
        feed: Callable[[bytes], None],
        takes_more: Callable[[], bool],
    ) -> None:
        self._transport = transport
        self._queue = queue
        self._size = size
        self._feed: Callable[[bytes], None] | None = feed
        self._takes_more = takes_more
        self._unread = bytearray()
        self._planned = False
        """The next part will be read."""

    def received(self, data: bytes) -> None:
        if self._feed is None:
            return
        if not self._unread and not self._planned:
            size = self._size()
            if len(data) <= size:
                self._feed(data)
                return
            # What follows may be of a kind that is read all at once: the rest of a body whose length is known.
            self._feed(data[:size])
            data = data[size:]
            if len(data) <= self._size() and self._reads_on():
                self._feed(data)
                return
        if self._feed is not None:
            self._unread += data
            self.go_on()

    def _reads_on(self) -> bool:
        return self._feed is not None and not self._transport.is_closing() and self._takes_more()

    def go_on(self) -> None:
        """Reads on, where the protocol takes more: first what was received, then the socket."""
        if self._planned or not self._reads_on():
            return
        if self._unread:
            self._planned = True
            self._transport.pause_reading()
            self._queue.add(self._read_part)
        else:
            self._transport.resume_reading()

    def close(self) -> None:
        """The connection is lost: nothing is fed any more. May be called twice."""
        self._unread.clear()
        self._feed = None
        self._takes_more = _takes_nothing

    def _read_part(self) -> None:
        self._planned = False
        if self._feed is None or self._transport.is_closing():
            self._unread.clear()
            return
        size = self._size()
        if size < len(self._unread):
            part = bytes(self._unread[:size])
            del self._unread[:size]
        else:
            part = bytes(self._unread)
            self._unread.clear()
        try:
            self._feed(part)
        except BaseException:
            self._transport.abort()  # as the event loop does where a protocol fails
            raise
        self.go_on()


def _takes_nothing() -> bool:
    return False


class PartedFlow(FlowControl):
    """uvicorn's flow control, over a connection that is read in parts."""

    def __init__(self, transport: asyncio.Transport, parted: PartedInput) -> None:
        super().__init__(transport)
        self._input = parted

    def resume_reading(self) -> None:
        if self.read_paused:
            self.read_paused = False
            self._input.go_on()
