"""One engine that the server starts: it is waited for, watched, started again by policy, and ended.

``EngineProcess`` is the only owner of the engine's process. One task runs its lives, one after another;
``restarts`` decides about the next one. What must hold: between two lives nothing is left of the first; a port is
the engine's own only while it lives; every end is told (``on_down``) before the next life, and every life after
the first one (``on_up``) when it answers. A new life serves the weights of its model folder again, whatever was
loaded before: whoever loaded other weights must load them again.

The task is asyncio's, because an engine's ``start`` and ``close`` are called from places that no task group spans.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import anyio

from turnstile_server.engines.bounds import EngineBounds
from turnstile_server.engines.child_log import ChildLog
from turnstile_server.engines.http_client import EngineHttp
from turnstile_server.engines.launch.bounds import LaunchBounds
from turnstile_server.engines.launch.command import HOST, check_launch, engine_command, missing_package
from turnstile_server.engines.launch.guarded import EngineExit, GuardedProcess, start_guarded
from turnstile_server.engines.launch.restarts import Restart, RestartPolicy
from turnstile_server.errors import EngineUnavailable, StartupError, TurnstileError
from turnstile_server.settings import EngineSettings, LaunchSettings

log = logging.getLogger(__name__)

POLL_S: Final = 0.25
REPORT_S: Final = 10.0
"""Time between two log lines about an engine that is waited for."""
SHOWN_CHARS: Final = 160
"""Characters of the last line of its log, where the progress shows it."""


@dataclass(frozen=True, slots=True)
class EngineUp:
    """The engine answers at ``url``. ``restarts``: lives before this one; it serves its first weights again."""

    url: str
    pid: int
    restarts: int


@dataclass(frozen=True, slots=True)
class EngineDown:
    """The engine has ended, or could not be started again. ``restart_in_s`` None: it is given up."""

    reason: str
    exit: EngineExit | None
    log_lines: tuple[str, ...]
    restart_in_s: float | None


async def _nobody(_event: EngineUp | EngineDown) -> None:
    """The default of ``on_up`` and ``on_down``: nobody is told."""


class EngineProcess:
    """The process of replica ``replica`` of an engine of ``settings.kind``, from ``start`` to ``stop``.

    ``tell`` is given the progress of the first start, as the end of "it waits for …". ``on_up`` and ``on_down``
    are called for what happens after the first start; a TurnstileError of ``on_up`` ends that life.
    """

    def __init__(
        self,
        settings: EngineSettings,
        launch: LaunchSettings,
        model_dir: Path,
        *,
        replica: int = 0,
        on_up: Callable[[EngineUp], Awaitable[None]] = _nobody,
        on_down: Callable[[EngineDown], Awaitable[None]] = _nobody,
        tell: Callable[[str], None] | None = None,
    ) -> None:
        """Raises StartupError for arguments that the engine may not have."""
        check_launch(settings.kind, launch)
        self.name = settings.kind if launch.replicas == 1 else f"{settings.kind}-{replica}"
        self.exit: EngineExit | None = None
        """The end of its last life; None before the first end."""
        self.down: EngineDown | None = None
        """The reason that it does not answer, since it has ended; None while it answers, and before its first
        start."""
        self._settings = settings
        self._launch = launch
        self._model_dir = model_dir.resolve()
        self._replica = replica
        self._on_up = on_up
        self._on_down = on_down
        self._tell = tell
        self._policy = RestartPolicy(launch)
        self._log = ChildLog(self.name, launch.bounds_of(LaunchBounds).log_lines)
        self._process: GuardedProcess | None = None
        self._url: str | None = None
        self._lives = 0
        self._problem = ""
        """The reason for which we ended the life that runs."""
        self._scope = anyio.CancelScope()
        self._task: asyncio.Task[None] | None = None
        self._first = anyio.Event()
        """Set when the first life answers, or has ended."""

    @property
    def url(self) -> str | None:
        """The URL at which it answers; None while it does not."""
        return self._url

    @property
    def pid(self) -> int | None:
        """The engine's own process; None while there is none."""
        return None if self._process is None else self._process.pid

    @property
    def guardian_pid(self) -> int | None:
        return None if self._process is None else self._process.guardian_pid

    @property
    def last_lines(self) -> list[str]:
        """The end of the engine's log."""
        return self._log.last_lines

    async def start(self) -> str:
        """Starts the engine; returns its URL when it answers. Raises StartupError with the end of its log.

        A first start that fails is not repeated. Nothing is left of it, nor of one that is cancelled.
        """
        if self._task is not None:
            raise RuntimeError("an EngineProcess is started once")
        self._task = asyncio.create_task(self._supervise(), name=f"{self.name}-supervisor")
        try:
            await self._first.wait()
        except BaseException:
            await self.stop()
            raise
        if self._url is None:
            await self.stop()
            reason = self.down.reason if self.down is not None else "it was stopped"
            reason += missing_package(self._settings.kind, self._launch, self.last_lines)
            raise StartupError(f"The engine ({self.name}) did not start: {reason}{self._log.tail()}")
        return self._url

    async def stop(self) -> None:
        """Ends the engine with all its processes, and restarts none. Safe to call twice, and before ``start``."""
        self._scope.cancel()
        if self._task is not None:
            with anyio.CancelScope(shield=True):
                await asyncio.wait([self._task])

    async def kill(self, reason: str) -> None:
        """Ends a life that is of no use (an engine that hangs, for one); the policy decides about the next one."""
        if self._process is not None:
            self._problem = reason
            await self._process.kill()

    async def _supervise(self) -> None:
        try:
            with self._scope:
                while await self._live():
                    continue
        except Exception as error:
            # Nobody waits for this task: what it raised would be seen by nobody, and the engine be thought alive.
            log.exception("the supervision of %s failed", self.name)
            self.down = EngineDown(f"its supervision failed: {error!r}", self.exit, (), None)
            self._url = None
            await self._on_down(self.down)
        finally:
            self._first.set()

    async def _live(self) -> bool:
        """One life. True when there is to be another, after its back-off."""
        self._problem = ""
        first = self._lives == 0
        try:
            end = await self._run_once()
            reason, code = self._problem or str(end), None if self._problem else end.code
        except TurnstileError as error:
            end, reason, code = None, error.message, None
        self._lives += 1
        if first and not self._first.is_set():
            self.down = EngineDown(reason, end, tuple(self.last_lines), None)
            return False
        decision = self._policy.after_exit(anyio.current_time(), code)
        lines = tuple(self.last_lines)
        if isinstance(decision, Restart):
            self.down = EngineDown(reason, end, lines, decision.delay_s)
            log.warning("%s: %s; it is started again in %g s", self.name, reason, decision.delay_s)
        else:
            self.down = EngineDown(f"{reason}. {decision.reason}", end, lines, None)
            log.error("%s: %s. %s It is given up.", self.name, reason, decision.reason)
        await self._on_down(self.down)
        if isinstance(decision, Restart):
            await anyio.sleep(decision.delay_s)
        return isinstance(decision, Restart)

    async def _run_once(self) -> EngineExit:
        """From the start of a process until nothing is left of it."""
        with _reserved_port(self._launch.port + self._replica if self._launch.port else 0) as reserved:
            port: int = reserved.getsockname()[1]
            url = f"http://{HOST}:{port}"
            command = engine_command(
                self._settings.kind, self._model_dir, port, self._launch, os.environ, replica=self._replica
            )
            process = self._process = await start_guarded(command, self._launch, self._log)
            log.info("%s: started, process %d, %s", self.name, process.pid, url)
            try:
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(self._until_ready, process, url)
                    end = self.exit = await process.exit()
                    tasks.cancel_scope.cancel()
                return end
            finally:
                self._url = None
                with anyio.CancelScope(shield=True):
                    await process.close()
                    await self._log.ended(self._launch.bounds_of(LaunchBounds).log_end_s)
                self._process = None

    async def _until_ready(self, process: GuardedProcess, url: str) -> None:
        limit_s = self._settings.start_timeout_s
        with anyio.move_on_after(limit_s) as wait:
            await self._wait_ready(process, url)
        if wait.cancelled_caught:
            await self.kill(f"it was not ready within engine.start_timeout_s ({limit_s:g} s)")
            return
        restarts, self._url, self.down = self._lives, url, None
        log.info("%s: ready at %s", self.name, url)
        self._first.set()
        if restarts:
            try:
                await self._on_up(EngineUp(url, process.pid, restarts))
            except TurnstileError as error:
                await self.kill(error.message)

    async def _wait_ready(self, process: GuardedProcess, url: str) -> None:
        """Until ``GET /health`` is 200."""
        http = EngineHttp(url, self._settings.model_copy(update={"connect_attempts": 1}))
        await http.open()
        started = report_at = anyio.current_time()
        try:
            while True:
                now = anyio.current_time()
                waited = f"process {process.pid} of {self.name}, {now - started:.0f} of "
                waited += f"{self._settings.start_timeout_s:g} s (engine.start_timeout_s)"
                if self._tell is not None and self._lives == 0:
                    last = self._log.last_line[:SHOWN_CHARS]
                    self._tell(f"the engine: {waited}{': ' if last else ''}{last}")
                if now >= report_at:
                    report_at = now + REPORT_S
                    log.info("waiting for the engine: %s", waited)
                try:
                    status, _ = await http.request(
                        "GET", "/health", timeout_s=self._settings.bounds_of(EngineBounds).probe_timeout_s
                    )
                except TurnstileError:
                    status = 0
                if status == 200:
                    return
                await anyio.sleep(POLL_S)
        finally:
            await http.close()

    def unavailable(self) -> EngineUnavailable:
        """The error of a call while the engine does not answer."""
        down = self.down
        if down is None:
            return EngineUnavailable(f"The engine ({self.name}) is not running.")
        if down.restart_in_s is None:
            after = "It is given up: see its log, then restart the server."
        elif self._process is not None:
            after = "It is being started again."
        else:
            after = f"It is started again in {down.restart_in_s:g} s."
        return EngineUnavailable(
            f"The engine ({self.name}) is down: {down.reason.removesuffix('.')}. {after}",
            detail={"log": list(down.log_lines)},
            retry_after_s=down.restart_in_s,
        )


def _reserved_port(wanted: int) -> socket.socket:
    """A socket that is bound to ``wanted``, or to a free port for 0, and does not listen.

    Engines load for minutes before they bind their port. Until then no connection and no other server gets it,
    while the engine can bind it too, because both sockets have SO_REUSEADDR (Linux). Raises StartupError where
    another program listens there: it might answer as if it were the engine.
    """
    reserved = socket.socket()
    try:
        if wanted:
            reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reserved.bind((HOST, wanted))
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    except OSError as error:
        reserved.close()
        raise StartupError(
            f"launch.port {wanted} cannot be had: {error.strerror}. Choose another port, or 0 for a free one."
        ) from error
    return reserved
