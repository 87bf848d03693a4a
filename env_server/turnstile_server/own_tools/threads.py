"""Threads for tools that are not async: bounded, and never waited for beyond their time.

Python cannot stop a thread. A call whose time is over, or whose episode ended, gives up its thread: it is
counted as stuck until the function returns, its result is dropped, and as a daemon thread it delays no shutdown.
What must hold: stuck threads take no place from other episodes; there are at most so many of one episode, and of
the server, that further calls are refused instead.
"""

from __future__ import annotations

import contextvars
import logging
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeVar

import anyio

from turnstile_server.errors import ToolsUnavailable
from turnstile_server.own_tools.bounds import OwnToolBounds
from turnstile_server.settings import ToolSettings
from turnstile_server.threads import result_of

_LOG = logging.getLogger(__name__)

T = TypeVar("T")


class ToolThreads:
    """All threads of own tools. Made in the event loop that uses it."""

    def __init__(self, settings: ToolSettings) -> None:
        self._settings = settings
        self._places = anyio.Semaphore(settings.bounds_of(OwnToolBounds).own_threads)
        self._stuck: Counter[str] = Counter()
        self._lock = threading.Lock()

    @property
    def stuck(self) -> int:
        """Threads that were given up and still run."""
        return self._stuck.total()

    async def run(self, owner: str, function: Callable[[], T], *, closing: bool = False) -> T:
        """Calls ``function`` in a thread, for the episode ``owner``. Cancelling gives the thread up. Raises what
        it raises, and ToolsUnavailable where too many threads are stuck; but what closes is always called."""
        if not closing:
            self._check(owner)
        async with self._places:
            future: Future[T] = Future()
            given_up = threading.Event()
            work = partial(self._work, owner, function, future, given_up, contextvars.copy_context())
            threading.Thread(target=work, name=f"own tool of {owner}", daemon=True).start()
            try:
                return await result_of(future)
            except anyio.get_cancelled_exc_class():
                with self._lock:
                    if not future.done():
                        given_up.set()
                        self._stuck[owner] += 1
                raise

    def _work(
        self,
        owner: str,
        function: Callable[[], Any],
        future: Future[Any],
        given_up: threading.Event,
        context: contextvars.Context,
    ) -> None:
        result: Any = None
        error: Exception | None = None
        try:
            result = context.run(function)
        except Exception as raised:  # noqa: BLE001 - the caller gets it, whatever it is
            error = raised
        except BaseException as raised:  # noqa: BLE001 - SystemExit and the like must not end the task that waits
            error = RuntimeError(f"{type(raised).__name__}: {raised}")
        with self._lock:  # a call is either answered or given up
            if given_up.is_set():
                self._stuck -= Counter({owner: 1})
                _LOG.warning("a call of an own tool that had been given up returned after all (%s)", owner)
            elif error is None:
                future.set_result(result)
            else:
                future.set_exception(error)

    def _check(self, owner: str) -> None:
        limits = self._settings.bounds_of(OwnToolBounds)
        if self._stuck[owner] >= limits.own_stuck_per_episode:
            raise ToolsUnavailable(
                f"{self._stuck[owner]} calls of this episode never returned, the most that are let run on"
            )
        if self.stuck >= limits.own_stuck_threads:
            raise ToolsUnavailable(
                f"{self.stuck} calls of own tools never returned, the most that this server lets run on"
            )
