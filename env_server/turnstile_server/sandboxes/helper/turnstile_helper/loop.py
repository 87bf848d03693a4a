"""The helper's event loop: descriptors, timers and ended children, in one thread (asyncio costs 50 ms at start).

Holds: a callback that raises is dropped, said on stderr, and stops nothing else. Never knows what a
callback is for.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import os
import selectors
import signal
import sys
import time
import traceback
from typing import Callable, NamedTuple  # noqa: UP035 - Python 3.8

Callback = Callable[[], None]


class _Watched(NamedTuple):
    """``serial``: of this time that the descriptor is looked at; its number may be another file's later."""

    serial: int
    read: Callback | None
    write: Callback | None


class Timer:
    def __init__(self, callback: Callback) -> None:
        self.callback: Callback | None = callback

    def cancel(self) -> None:
        self.callback = None


class Loop:
    """``on_children``: called whenever children may have ended."""

    def __init__(self, on_children: Callback) -> None:
        self._on_children = on_children
        self._selector = selectors.DefaultSelector()
        self._timers: list[tuple[float, int, Timer]] = []
        self._order = itertools.count()
        self._wake, wake_end = os.pipe()
        os.set_blocking(self._wake, False)
        os.set_blocking(wake_end, False)
        signal.set_wakeup_fd(wake_end, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        self.watch(self._wake, read=self._woken)

    def watch(
        self,
        fd: int,
        read: Callback | None = None,
        write: Callback | None = None,
    ) -> None:
        """Sets both callbacks of a descriptor; none of them: it is no longer looked at."""
        known = self._selector.get_map().get(fd)
        events = (selectors.EVENT_READ if read else 0) | (selectors.EVENT_WRITE if write else 0)
        if not events:
            if known is not None:
                self._selector.unregister(fd)
        elif known is not None:
            self._selector.modify(fd, events, _Watched(known.data.serial, read, write))
        else:
            self._selector.register(fd, events, _Watched(next(self._order), read, write))

    def call_later(self, delay_s: float, callback: Callback) -> Timer:
        timer = Timer(callback)
        heapq.heappush(self._timers, (time.monotonic() + delay_s, next(self._order), timer))
        return timer

    def run(self) -> None:
        """For ever: the helper ends by leaving its process."""
        while True:
            for key, events in self._selector.select(self._run_timers()):
                # Each callback may have closed this descriptor, or changed its mind about it.
                if events & selectors.EVENT_READ and (now := self._watched(key)) and now.read:
                    self._call(now.read, key)
                if events & selectors.EVENT_WRITE and (now := self._watched(key)) and now.write:
                    self._call(now.write, key)

    def _watched(self, key: selectors.SelectorKey) -> _Watched | None:
        """The present callbacks of an event's descriptor, if it is still the same file."""
        now = self._selector.get_map().get(key.fd)
        return now.data if now is not None and now.data.serial == key.data.serial else None

    def _run_timers(self) -> float | None:
        """Runs what is due; returns the seconds to the next one."""
        while self._timers:
            due, _, timer = self._timers[0]
            left = due - time.monotonic()
            if timer.callback is not None and left > 0:
                return left
            heapq.heappop(self._timers)
            if timer.callback is not None:
                self._call(timer.callback, None)
        return None

    def _call(self, callback: Callback, key: selectors.SelectorKey | None) -> None:
        try:
            callback()
        except Exception:  # noqa: BLE001 - one request's fault may not end the others
            sys.stderr.write(traceback.format_exc())
            if key is not None and self._watched(key):
                self.watch(key.fd)

    def _woken(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self._wake, 4096)
        self._on_children()
