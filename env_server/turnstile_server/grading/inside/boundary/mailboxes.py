"""Which thread here talks with which thread of the other side.

Each thread that talks has a mailbox. A message names, by their numbers, the mailbox it is for (``t``) and the one
that its answer goes to (``f``). A thread's first request names no mailbox: the other side starts a thread for it,
which is its partner from then on.

Python 3.9 or later, standard library only.
"""

from __future__ import annotations

import itertools
import queue
import threading
from collections.abc import Callable
from typing import Any

from .wire import WireError

MAX_THREADS = 64
"""Threads that the other side may have started here."""
MAX_WAITING = 64
"""Messages that one thread has not looked at: each conversation has one under way."""


class Mailbox:
    """One thread's messages; None: there will be no more."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.queue: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()


class Conversation(threading.local):
    """One thread's own state."""

    def __init__(self) -> None:
        self.box: Mailbox | None = None
        self.partners: list[int | None] = [None]
        """The mailbox that the other side listens at for this thread, the innermost call's last."""


class Mailboxes:
    """One side's. ``serve``: executes a request in the thread that it came to."""

    def __init__(self, serve: Callable[[dict[str, Any]], None]) -> None:
        self.here = Conversation()
        self._serve = serve
        self._boxes: dict[int, Mailbox] = {}
        self._numbers = itertools.count()
        self._threads = 0

    def own(self) -> Mailbox:
        """This thread's."""
        if self.here.box is None:
            self.here.box = self._new()
        return self.here.box

    def deliver(self, message: dict[str, Any]) -> None:
        """Puts a message into its mailbox. Raises WireError for more than is asked, LookupError for a mailbox that
        is not there."""
        to = message.get("t")
        if to is None and "q" in message:
            self._start_thread(message)
            return
        box = self._boxes[to if type(to) is int else -1]
        if box.queue.qsize() >= MAX_WAITING:
            raise WireError("it sends more than is asked")
        box.queue.put(message)

    def serve_forever(self, box: Mailbox | None = None) -> None:
        """Serves what comes to this thread until the connection ends. ``box``: made for it before it started."""
        if box is not None:
            self.here.box = box
        box = self.own()
        while True:
            message = box.queue.get()
            if message is None:
                return
            if "q" in message:
                self._serve(message)

    def close(self) -> None:
        """Wakes every thread that waits, for the last time."""
        for box in list(self._boxes.values()):
            box.queue.put(None)

    def _start_thread(self, message: dict[str, Any]) -> None:
        if self._threads >= MAX_THREADS:
            raise WireError(f"more than {MAX_THREADS} threads talk")
        self._threads += 1
        box = self._new()
        box.queue.put(message)
        threading.Thread(target=self.serve_forever, args=(box,), name="boundary call", daemon=True).start()

    def _new(self) -> Mailbox:
        box = Mailbox(next(self._numbers))
        self._boxes[box.number] = box
        return box
