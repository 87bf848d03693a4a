"""One worker process as the process in front has it: started, watched, started again, and ended.

``WorkerChild`` owns the process and its listening sockets, which outlive it: what connects while a worker is being
started again waits in them. What must hold: at most one life of it at a time; it is told to end once, and is gone
when ``stop`` returns.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import sys
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import anyio
import orjson
from anyio.abc import Process
from anyio.streams.buffered import BufferedByteReceiveStream

from turnstile_server.child_processes import send_signal
from turnstile_server.errors import StartupError
from turnstile_server.settings import WorkerSettings
from turnstile_server.workers.bounds import WorkerBounds
from turnstile_server.workers.orders import WorkerOrders
from turnstile_server.workers.worker import PARENT

_LOG = logging.getLogger(__name__)
_STATUS_BYTES = 1 << 20
_KILL_AFTER_S = 15.0
"""Beyond ``shutdown_grace_s``: for what is behind a worker's listeners, sandboxes first of all."""


@dataclass(slots=True, eq=False)
class WorkerChild:
    """``orders``: what each life of it is told. ``sockets``: those that it inherits; ``grace_s``: its time to end.
    ``changed`` is called when it is up, and when it is not any more."""

    number: int
    orders: WorkerOrders
    sockets: tuple[socket.socket, ...]
    settings: WorkerSettings
    grace_s: float
    changed: Callable[[WorkerChild], None]
    up: anyio.Event = field(default_factory=anyio.Event)
    """Set while it serves; a new one for each life."""
    given_up: str | None = None
    """Reason why it is not started any more."""
    ready: dict[str, object] = field(default_factory=dict)
    """The ready event of its latest life."""
    lives: int = 0
    _process: Process | None = None
    _stopping: bool = False
    _restarts: deque[float] = field(default_factory=deque)

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    @property
    def is_archive(self) -> bool:
        """It only shows what workers had that there are no more."""
        return bool(self.orders.archives)

    async def start(self) -> None:
        """Returns when it serves. Raises StartupError with its own words."""
        process = await self._spawned()
        try:
            self.ready = await self._first_words(process)
        except BaseException:
            with anyio.CancelScope(shield=True):
                await self._end(signal.SIGKILL, 0)
                self._process = None
                await process.aclose()
            raise
        self.lives += 1
        self.up.set()
        self.changed(self)

    async def watch(self) -> None:
        """Starts it again whenever it ends by itself, until it is stopped or given up."""
        while self._process is not None:
            code = await self._process.wait()
            self.up = anyio.Event()
            await self._process.aclose()
            self._process = None
            if self._stopping:
                return
            _LOG.error("worker %d has ended with code %s; episodes that ran there have failed", self.number, code)
            self.changed(self)
            await self._again()

    async def stop(self, at_once: bool = False) -> None:
        """Asks it to end, and returns when it has: by force, when its time is over. ``at_once``: it has drained
        for the whole grace, so its calls in progress get no more time."""
        self._stopping = True
        # SIGINT: no drain of its own. SIGTERM to a server that drains: its grace is over (``http/draining.py``).
        await self._end(signal.SIGTERM if at_once else signal.SIGINT, self.grace_s + _KILL_AFTER_S)

    async def _again(self) -> None:
        """Starts it, after a pause; again where that fails. Gives it up when it was started too often."""
        while not self._stopping:
            delay_s = self._delay(anyio.current_time())
            if delay_s is None:
                self.given_up = (
                    f"worker {self.number} was started again {self.settings.max_restarts} times within "
                    f"{self.settings.bounds_of(WorkerBounds).restart_window_s:g} s, which is "
                    "workers.max_restarts; its episodes can be read when the server is started again"
                )
                _LOG.error("%s", self.given_up)
                for each in self.sockets:
                    each.close()
                self.changed(self)
                return
            await anyio.sleep(delay_s)
            try:
                await self.start()
            except StartupError as error:
                _LOG.error("worker %d cannot be started again: %s", self.number, error.message)
                continue
            _LOG.warning("worker %d serves again", self.number)
            return

    def _delay(self, now: float) -> float | None:
        """Seconds to wait before the next restart; None: there were too many. ``now``: monotonic."""
        settings, restarts = self.settings, self._restarts
        bounds = settings.bounds_of(WorkerBounds)
        while restarts and restarts[0] <= now - bounds.restart_window_s:
            restarts.popleft()
        if len(restarts) >= settings.max_restarts:
            return None
        restarts.append(now)
        return float(min(bounds.backoff_start_s * 2.0 ** min(len(restarts) - 1, 60), settings.backoff_ceiling_s))

    async def _spawned(self) -> Process:
        command = [sys.executable, "-m", "turnstile_server.workers.worker"]
        with anyio.CancelScope(shield=True):  # a start that is cancelled half-way would lose the process
            process = self._process = await anyio.open_process(
                command,
                stdin=-1,
                stdout=-1,
                stderr=None,
                env={**os.environ, PARENT: str(os.getpid())},
                start_new_session=True,
                pass_fds=[each.fileno() for each in self.sockets],
            )
            assert process.stdin is not None
            with contextlib.suppress(anyio.BrokenResourceError, OSError):  # it ended: its exit code tells
                await process.stdin.send(self.orders.encoded())
            await process.stdin.aclose()
        return process

    async def _first_words(self, process: Process) -> dict[str, object]:
        assert process.stdout is not None
        try:
            line = await BufferedByteReceiveStream(process.stdout).receive_until(b"\n", _STATUS_BYTES)
        except (anyio.IncompleteRead, anyio.EndOfStream):
            code = await process.wait()
            raise StartupError(f"worker {self.number} ended with code {code} while it started") from None
        said: dict[str, object] = orjson.loads(line)
        if said["event"] == "failed":
            await process.wait()
            raise StartupError(str(said["message"]))
        return said

    async def _end(self, number: int, within_s: float) -> None:
        process = self._process
        if process is None:
            return
        send_signal(process, number)
        with anyio.move_on_after(within_s) as ending:
            await process.wait()
        if ending.cancelled_caught and number != signal.SIGKILL:
            _LOG.error("worker %d did not end within %g s: it is killed", self.number, within_s)
        send_signal(process, signal.SIGKILL)
        await process.wait()
