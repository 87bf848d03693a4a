"""Answers from threads to tasks of the event loop.

The one place of the journal, the embedded engine, worlds and the resolver that needs asyncio: a thread that must
not wait calls into the loop by ``call_soon_threadsafe``. anyio's ``from_thread.run_sync`` would make the thread
wait for the loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar, TypeVarTuple

import anyio

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


class LoopCaller:
    """Calls functions in the event loop in which it was made, from any thread, without waiting for them."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()

    def call(self, function: Callable[[*Ts], object], *arguments: *Ts) -> None:
        """Calls are made in the order in which one thread asks for them."""
        self._loop.call_soon_threadsafe(function, *arguments)

    def wait_for(self, call: Coroutine[Any, Any, T]) -> T:
        """Runs a coroutine in the event loop, and waits for its result or its error. Not to be called there."""
        return asyncio.run_coroutine_threadsafe(call, self._loop).result()


async def result_of(future: Future[T]) -> T:
    """The result of work in a thread, or its error. Cancelling the caller does not stop the work."""
    done, loop = anyio.Event(), LoopCaller()
    future.add_done_callback(lambda _: loop.call(done.set))
    await done.wait()
    return future.result()
