"""The event loop behind the blocking client: one daemon thread, one ``AsyncClient``, calls from any thread.

What must hold:

- A loop belongs to the process that made it. A forked child has no such thread, so it makes a loop of its own
  and never touches the inherited one: the connections are the parent's.
- A call that is interrupted (KeyboardInterrupt) is cancelled on the loop, and has what it must undo (weights
  half sent) undone before the interrupt goes on, within ``cancel_s``. A second interrupt ends that wait.
- A call that waits when the loop is closed ends with an error. No call waits for a loop that has ended.
- The end of the interpreter closes the loop, within ``cancel_s`` and a little, and is never held up beyond that.

asyncio rather than anyio: submitting a call must not wait for the loop, and anyio's portal waits.
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import suppress
from importlib import import_module
from typing import Any, Generic, TypeVar

from turnstile import errors
from turnstile._rollout_stream import RolloutStream
from turnstile.client import AsyncClient
from turnstile.rollout import Rollout, TaskLike

T = TypeVar("T")

_END = object()
_USED_BY_CALLS = ("anyio._backends._asyncio", "concurrent.futures.thread")
"""Modules that anyio and asyncio import during a first call. A fork during an import leaves its lock held in the
child, so these are imported before there is a thread."""
_START_POLL_S = 0.001
_JOIN_S = 2.0
"""Seconds for the loop's thread to end, beyond the time that cancelling episodes may take."""


class LoopThread:
    """An event loop in a daemon thread of this process, and the client that lives on it.

    Nothing runs before the first ``call``. Methods may be called from any thread.
    """

    def __init__(self, make_client: Callable[[], AsyncClient], cancel_s: float) -> None:
        for module in _USED_BY_CALLS:
            import_module(module)
        self.process = os.getpid()
        self._client = make_client()
        self._cancel_s, self._close_s = cancel_s, cancel_s + _JOIN_S
        self._lock = threading.RLock()
        """Held to submit and to close, never while a call runs. A signal handler or a finalizer that interrupts
        its holder may submit or close too."""
        self._closed = False
        self._claim = threading.Lock()
        """Taken by the thread that serves, for good."""
        self._thread: threading.Thread | None = None
        """The thread that serves."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event | None = None
        self._failure: BaseException | None = None
        """The error that kept the loop from starting."""

    def call(self, operation: Callable[[AsyncClient], Awaitable[T]]) -> T:
        """Runs ``operation`` on the loop and returns its result, or raises its error.

        Raises InvalidRequest on a closed loop and in the loop's own thread; ServerUnavailable where the loop was
        closed meanwhile.
        """
        if threading.current_thread() is self._thread:
            raise errors.InvalidRequest(
                "the client was called from its own event loop; a callback such as on_progress must not call it"
            )
        waiting = _Call(operation)
        loop = self._submit(waiting)
        try:
            waiting.ended.acquire()
        except BaseException:
            waiting.interrupt(loop, self._cancel_s)
            raise
        return waiting.result()

    def close(self) -> None:
        """Ends rollouts, closes the connections and ends the thread. May be called again, from any thread."""
        if self.process != os.getpid():
            return
        with self._lock:
            first, self._closed = not self._closed, True
            if self._thread is None:
                return
            if first:
                loop = self._started_loop()
                assert self._stop is not None
                loop.call_soon_threadsafe(self._stop.set)
        if threading.current_thread() is not self._thread and not sys.is_finalizing():
            self._thread.join(self._close_s)

    @property
    def closed(self) -> bool:
        """True if calls are refused: the loop was closed, or it belongs to another process."""
        return self._closed or self.process != os.getpid()

    def _submit(self, call: _Call[Any]) -> asyncio.AbstractEventLoop:
        if self.process != os.getpid():  # before the lock, which a fork may have found held
            raise errors.InvalidRequest("this loop over rollouts was begun in another process")
        with self._lock:
            # A call submitted under the lock reaches the loop before the request to stop.
            if self._closed or sys.is_finalizing():
                raise errors.InvalidRequest("the client is closed")
            if self._loop is None:
                # A signal handler that comes in the middle of this may call, too, and cannot wait for a thread
                # that is not started yet: each starts one, and the first to run serves.
                threading.Thread(target=self._run, name="turnstile-client", daemon=True).start()
            loop = self._started_loop()
            loop.call_soon_threadsafe(call.begin, self._client)
            return loop

    def _started_loop(self) -> asyncio.AbstractEventLoop:
        """Waits without a lock: a signal handler that interrupts this may wait for the same."""
        while self._loop is None:
            if self._failure is not None:
                raise self._failure
            time.sleep(_START_POLL_S)
        return self._loop

    def _run(self) -> None:
        if not self._claim.acquire(blocking=False):
            return
        self._thread = threading.current_thread()
        try:
            asyncio.run(self._serve())
        except BaseException as error:
            if self._loop is not None:
                raise
            self._failure = error

    async def _serve(self) -> None:
        """Runs until it must stop. ``asyncio.run`` then cancels the calls that wait."""
        self._stop = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        await self._stop.wait()
        await self._client.close()


class _Call(Generic[T]):
    """One call on its way. ``ended``: a lock that is held until then.

    Only that lock is waited for. A future or an event has a lock of its own, which a signal handler may find held
    by the call that it interrupts, and which the loop needs to end that call.
    """

    def __init__(self, operation: Callable[[AsyncClient], Awaitable[T]]) -> None:
        self.ended = threading.Lock()
        self.ended.acquire()
        self._operation = operation
        self._task: asyncio.Task[T] | None = None
        self._cancelled = False

    def begin(self, client: AsyncClient) -> None:
        """In the loop."""

        async def run() -> T:
            return await self._operation(client)

        self._task = asyncio.get_running_loop().create_task(run())
        self._task.add_done_callback(self._end)
        if self._cancelled:
            self._task.cancel()

    def _end(self, task: asyncio.Task[T]) -> None:
        if not task.cancelled():
            task.exception()  # seen: one that nobody waits for any more is not logged
        self.ended.release()

    def interrupt(self, loop: asyncio.AbstractEventLoop, limit_s: float) -> None:
        """Cancels it, and waits until it has ended, ``limit_s`` at most."""

        def cancel() -> None:
            self._cancelled = True
            if self._task is not None:
                self._task.cancel()

        with suppress(RuntimeError):  # the loop has ended, and all its calls
            loop.call_soon_threadsafe(cancel)
            self.ended.acquire(timeout=limit_s)

    def result(self) -> T:
        """The result of a call that has ended. Raises its error; ServerUnavailable if the loop was closed
        meanwhile."""
        assert self._task is not None
        try:
            return self._task.result()
        except asyncio.CancelledError:
            raise errors.ServerUnavailable(
                "the client was closed before the call had ended", may_have_happened=True
            ) from None


class BlockingStream:
    """A rollout stream read by blocking calls. ``close`` may be called from any thread, also twice."""

    def __init__(self, loop: LoopThread, open_stream: Callable[[AsyncClient], RolloutStream]) -> None:
        self._loop = loop
        self._open_stream = open_stream
        self._stream: RolloutStream | None = None

    def next(self) -> Rollout | None:
        """The next rollout to end, None after the last. For one thread at a time."""
        return self._loop.call(self._next)

    def close(self) -> None:
        """Cancels what runs. A loop that was closed has done so, and that of another process is not ours."""
        if self._stream is not None and not self._loop.closed:
            stream = self._stream
            with suppress(errors.InvalidRequest):  # closed meanwhile
                self._loop.call(lambda _: stream.close())

    async def _next(self, client: AsyncClient) -> Rollout | None:
        if self._stream is None:
            self._stream = self._open_stream(client)
        return await self._stream.next()


async def in_thread(function: Callable[..., T], *arguments: Any) -> T:
    """``function`` in a daemon thread of its own. A cancelled caller leaves the thread to end by itself."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def work() -> None:
        try:
            result = function(*arguments)
        except BaseException as error:  # noqa: BLE001 - raised again where the result is awaited
            _settle(loop, done, done.set_exception, _as_failure(error))
        else:
            _settle(loop, done, done.set_result, result)

    threading.Thread(target=work, name="turnstile-callback", daemon=True).start()
    return await done


async def pulled_in_threads(tasks: Iterator[TaskLike]) -> AsyncIterator[TaskLike]:
    """The caller's iterator may block: a queue, a file, a data loader."""
    while (task := await in_thread(next, tasks, _END)) is not _END:
        yield task


def _as_failure(error: BaseException) -> Exception:
    """The error as one for a future: a command's SystemExit would end the loop, and no future takes a
    StopIteration."""
    if isinstance(error, Exception) and not isinstance(error, StopIteration):
        return error
    return RuntimeError(f"{type(error).__name__}: {error}")


def _settle(
    loop: asyncio.AbstractEventLoop, done: asyncio.Future[Any], settle: Callable[[Any], None], outcome: object
) -> None:
    with suppress(RuntimeError):  # the loop has closed: the result has no reader
        loop.call_soon_threadsafe(lambda: None if done.done() else settle(outcome))
