"""The worker's own process, and its messages with the trainer's process over one pipe.

It imports neither TRL nor torch (the script that started it may, when it is imported again). It ends on a Stop
message, on SIGTERM, and when the trainer's process is gone, however that died; the episodes that run are cancelled
first. It ignores SIGINT, which a terminal sends to the trainer too: the trainer decides.

asyncio rather than anyio: the pipe's listener is a thread that must be able to stop the loop without waiting
for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import threading
import traceback
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.sharedctypes import Synchronized

from turnstile.exporters.trl.loop import LoopOptions, Metrics, RolloutLoop
from turnstile.exporters.trl.rows import Row

BEAT_S = 1.0
"""Seconds between two signs of life."""
_TELL_S = 5.0
"""The servers are told of the last step within this time, before the worker ends."""
_TRACE_CHARS = 20_000


@dataclass(frozen=True, slots=True)
class GroupResult:
    """To the trainer: one group's rows, and metrics."""

    rows: tuple[Row, ...]
    metrics: Metrics


@dataclass(frozen=True, slots=True)
class Beat:
    """To the trainer: a sign of life."""


@dataclass(frozen=True, slots=True)
class Failed:
    """To the trainer: the error that ended the loop. The last message."""

    kind: str
    message: str
    trace: str


@dataclass(frozen=True, slots=True)
class Version:
    """To the worker: the trainer's newest version. ``taken``: rows that the trainer took before it, in all."""

    number: int
    taken: int


@dataclass(frozen=True, slots=True)
class Stop:
    """To the worker: end."""


def main(options: LoopOptions, pipe: Connection, taken: Synchronized[int], version: int) -> None:
    """``taken``: how many rows the trainer has taken so far."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the trainer's process is gone
        asyncio.run(_Supervisor(options, pipe, taken, version).run())


class _Supervisor:
    """Runs the rollout loop until it must stop. It is the loop's outlet, too."""

    def __init__(self, options: LoopOptions, pipe: Connection, taken: Synchronized[int], version: int) -> None:
        self._options = options
        self._pipe = pipe
        self._taken = taken
        self._version = version
        self._sent = 0
        self._stop = asyncio.Event()
        self._replaced: asyncio.Queue[tuple[int, int]] = asyncio.Queue()
        """Rows taken in all, and the version that was replaced then: of each step that has ended."""
        self._sender = ThreadPoolExecutor(1)  # one, so that no two messages are mixed

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, self._stop.set)
        threading.Thread(target=self._listen, args=(loop,), daemon=True).start()
        rollouts = RolloutLoop(self._options, self)
        work = asyncio.create_task(rollouts.run())
        beats = asyncio.create_task(self._beat())
        steps = asyncio.create_task(self._tell_steps(rollouts))
        stop = asyncio.create_task(self._stop.wait())
        try:
            await asyncio.wait({work, beats, steps, stop}, return_when=asyncio.FIRST_COMPLETED)
            if stop.done() and not work.done():
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._replaced.join(), _TELL_S)
        finally:
            tasks = (work, beats, steps, stop)
            for task in tasks:
                task.cancel()
            outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        for error in outcomes:
            if isinstance(error, Exception):
                trace = "".join(traceback.format_exception(error))[-_TRACE_CHARS:]
                await self._send(Failed(type(error).__name__, str(error), trace))
                return

    def _listen(self, loop: asyncio.AbstractEventLoop) -> None:
        """In a thread of its own, until the trainer's end of the pipe is closed."""
        for message in received(self._pipe):
            if isinstance(message, Stop):
                break
            if isinstance(message, Version):
                with contextlib.suppress(RuntimeError):
                    loop.call_soon_threadsafe(self._replaced.put_nowait, (message.taken, self._version))
                self._version = message.number
        with contextlib.suppress(RuntimeError):  # the loop has ended by itself
            loop.call_soon_threadsafe(self._stop.set)

    async def _tell_steps(self, rollouts: RolloutLoop) -> None:
        while True:
            taken, version = await self._replaced.get()
            await rollouts.tell_trained(taken, version)
            self._replaced.task_done()

    async def _beat(self) -> None:
        while True:
            await self._send(Beat())
            await asyncio.sleep(BEAT_S)

    async def send(self, rows: tuple[Row, ...], metrics: Metrics) -> None:
        self._sent += len(rows)
        await self._send(GroupResult(rows, metrics))

    def rows_waiting(self) -> int:
        return self._sent - self._taken.value

    def model_version(self) -> int:
        return self._version

    async def _send(self, message: object) -> None:
        """In a thread: a large message waits for its reader."""
        await asyncio.get_running_loop().run_in_executor(self._sender, self._pipe.send, message)


def received(pipe: Connection) -> Iterator[object]:
    """The messages of the other end, until it is closed or its process is gone."""
    with contextlib.suppress(EOFError, OSError):
        while True:
            yield pipe.recv()
