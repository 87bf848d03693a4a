"""A rollout stream for callers that block: it runs on an event loop in a thread of its own.

The loop's thread and those that run the caller's functions are daemons: an interpreter that ends does not wait
for them.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import ExitStack, suppress
from typing import Any, TypeVar

from anyio.from_thread import BlockingPortal, start_blocking_portal

from turnstile import errors
from turnstile._rollout_stream import RolloutStream
from turnstile.client import AsyncClient
from turnstile.rollout import Rollout, RolloutOptions, TaskLike, Tasks

T = TypeVar("T")

_END = object()


class BlockingStream:
    """``next`` is for one thread at a time; ``close`` may be called from any, also twice."""

    def __init__(self, make_client: Callable[[], AsyncClient], tasks: Tasks, options: RolloutOptions) -> None:
        if not isinstance(tasks, Iterable):
            raise errors.InvalidRequest("tasks must be an iterable; async ones are for AsyncClient")
        self._make_client = make_client
        self._tasks = tasks
        self._options = options
        self._closing = threading.Lock()
        self._stack = ExitStack()
        self._started: tuple[BlockingPortal, RolloutStream] | None = None

    def next(self) -> Rollout | None:
        if self._started is None:
            self._started = self._start()
        portal, stream = self._started
        return portal.call(stream.next)

    def close(self) -> None:
        with self._closing:
            self._stack.close()

    def _start(self) -> tuple[BlockingPortal, RolloutStream]:
        portal = self._stack.enter_context(start_blocking_portal())
        client = self._make_client()
        self._stack.callback(portal.call, client.close)
        stream = client._stream(_pulled_in_threads(iter(self._tasks)), self._options)
        self._stack.callback(portal.call, stream.close)
        return portal, stream


async def in_thread(function: Callable[..., T], *arguments: Any) -> T:
    """``function`` in a thread of its own. Who stops waiting leaves it to end by itself."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def work() -> None:
        try:
            result = function(*arguments)
        except BaseException as error:  # noqa: BLE001 - raised again where it is waited for
            _tell(loop, done, done.set_exception, _as_failure(error))
        else:
            _tell(loop, done, done.set_result, result)

    threading.Thread(target=work, daemon=True).start()
    return await done


def _as_failure(error: BaseException) -> Exception:
    """What ends a thread (a command's SystemExit) must not end the loop, and no future takes a StopIteration."""
    if isinstance(error, Exception) and not isinstance(error, StopIteration):
        return error
    return RuntimeError(f"{type(error).__name__}: {error}")


def _tell(
    loop: asyncio.AbstractEventLoop, done: asyncio.Future[Any], settle: Callable[[Any], None], outcome: object
) -> None:
    with suppress(RuntimeError):  # the loop has closed: nobody waits any more
        loop.call_soon_threadsafe(lambda: None if done.done() else settle(outcome))


async def _pulled_in_threads(tasks: Iterator[TaskLike]) -> AsyncIterator[TaskLike]:
    """The caller's iterator may block: a queue, a file, a data loader."""
    while (task := await in_thread(next, tasks, _END)) is not _END:
        yield task
