"""Ends a server whose event loop stands still, so that whoever supervises it starts it again.

Such a server serves nobody, takes no signal, and cannot notice it itself. One way into it was found by taking its
memory away: a thread that dies before it has begun leaves ``Thread.start`` of CPython 3.11 waiting for ever, and
anyio starts its worker threads in the event loop. What was acknowledged is in the journal.
"""

from __future__ import annotations

import faulthandler
import os
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import anyio

EXIT_CODE = 70
"""EX_SOFTWARE of sysexits.h."""
STDERR = 2
CHECKS = 10
"""Looks per limit. Looks are counted, not seconds: of a process that was stopped, or a machine that slept, the
watching thread stood still too."""


@asynccontextmanager
async def ended_at_standstill(limit_s: float, end: Callable[[], None] | None = None) -> AsyncIterator[None]:
    """``end`` (default: write every thread's stack to stderr and leave with EXIT_CODE) is called in a thread when
    the event loop has run nothing for ``limit_s`` seconds in the block; 0: never."""
    if not limit_s:
        yield
        return
    watch = _Watch(limit_s / CHECKS, end or _ending(limit_s))
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(watch.beat)
        watch.thread.start()
        try:
            yield
        finally:
            watch.over.release()
            watch.thread.join()
            tasks.cancel_scope.cancel()


class _Watch:
    """The event loop counts ``beats``; the thread, which needs no memory for it, looks whether they grow."""

    def __init__(self, step_s: float, end: Callable[[], None]) -> None:
        self.beats = 0
        self.over = threading.Lock()
        self.over.acquire()
        self.thread = threading.Thread(target=self._look, name="standstill", daemon=True)
        self._step_s = step_s
        self._end = end

    async def beat(self) -> None:
        while True:
            self.beats += 1
            await anyio.sleep(self._step_s)

    def _look(self) -> None:
        missed = seen = 0
        while not self.over.acquire(timeout=self._step_s):
            missed = missed + 1 if self.beats == seen else 0
            seen = self.beats
            if missed == CHECKS:
                self._end()


def _ending(limit_s: float) -> Callable[[], None]:
    told = (
        f"turnstile: the event loop has stood still for {limit_s:g} s (standstill_s), so nobody is served. The "
        "process ends, to be started again; acknowledged turns are in the journal. Its threads:\n"
    ).encode()

    def end() -> None:
        try:
            os.set_blocking(STDERR, False)  # the loop may stand in a write to it that nobody reads
            os.write(STDERR, told)
            faulthandler.dump_traceback(STDERR)
            os.set_blocking(STDERR, True)  # the terminal or pipe is others' too
        finally:
            os._exit(EXIT_CODE)

    return end
