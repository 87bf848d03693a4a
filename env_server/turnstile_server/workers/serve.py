"""The process in front of several workers: its listeners, its workers, its signals, its exit code.

``run_workers`` is what ``turnstile serve --workers N`` calls. The control listener answers at once; what is behind
it is there when every worker serves. What must hold: one server per data directory, whatever its workers do; this
process's death is the workers' (``worker.py``); a stop ends them all, each with its own grace, before this process
ends; every socket and folder that this process makes is its to close and to remove.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio
import anyio.to_thread

from turnstile_server.control.agent_address import loopback_url
from turnstile_server.data_dir import WORKERS, prepare_data_dir, worker_folders
from turnstile_server.errors import StartupError
from turnstile_server.http.bounds import ListenerBounds
from turnstile_server.http.connections import ConnectionLimits
from turnstile_server.http.descriptors import raise_descriptor_limit
from turnstile_server.http.draining import StopSignals, until_end
from turnstile_server.http.listeners import Listener, bind, url_of
from turnstile_server.http.starting import StartingApp, StartProgress
from turnstile_server.machine_share import core_count
from turnstile_server.observability.log_lines import LogFormatter, WithoutLooks
from turnstile_server.observability.standstill import ended_at_standstill
from turnstile_server.process import freeze_what_is_there, on_signal, say_ready, startup_errors, tell_refusal
from turnstile_server.settings import Settings

if TYPE_CHECKING:
    from turnstile_server.workers.crew_drain import CrewDrain

_LOG = logging.getLogger(__name__)
_MORE_GRACE_S = 3.0
"""Beyond the workers' own grace: their last words are passed on."""


def worker_count(settings: Settings) -> int:
    """Number of worker processes to run. A server without a model has one."""
    if settings.engine.kind == "none":
        return 1
    count = settings.workers.count
    return core_count() if count == "auto" else count


def needs_front(settings: Settings) -> bool:
    """True if there is a process in front: with several workers, and where the data directory has episodes of
    workers that no longer exist."""
    try:
        return worker_count(settings) > 1 or bool(retired(settings, 1))
    except OSError:
        return False  # the server itself says what is wrong with its data directory


def retired(settings: Settings, count: int) -> tuple[Path, ...]:
    """Data directories of workers that are not started."""
    return tuple(path for number, path in worker_folders(settings.data_dir).items() if number >= count)


def run_workers(settings: Settings) -> int:
    """Serves, and returns the exit code, as ``process.run`` does."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(LogFormatter())
    handler.addFilter(WithoutLooks())
    logging.basicConfig(level=settings.log_level.upper(), handlers=[handler])
    code = 0
    try:
        anyio.run(_serve, settings, backend_options={"use_uvloop": True})
    except* StartupError as group:
        tell_refusal(startup_errors(group)[0])  # the workers say the same
        code = 2
    return code


async def _serve(settings: Settings) -> None:
    signals, started, starting = StopSignals(), anyio.Event(), anyio.CancelScope()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(on_signal, signals, started, starting)
        with starting:
            async with fronting(settings) as (ready, drain), ended_at_standstill(settings.standstill_s):
                started.set()
                freeze_what_is_there()
                say_ready(ready)
                drain.grace_over = await until_end(signals, drain, settings.shutdown_grace_s)
        tasks.cancel_scope.cancel()


@asynccontextmanager
async def fronting(settings: Settings) -> AsyncIterator[tuple[dict[str, Any], CrewDrain]]:
    """The whole server for the length of the block, which begins when it is ready: the ready event, and its
    draining. Raises StartupError."""
    with ExitStack() as sockets:
        listener, starting, control_url = _control_listener(settings, sockets)
        progress = starting.progress
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_shielded_serve, listener)
            try:
                progress.waits_for = "its workers' code"
                build = await anyio.to_thread.run_sync(
                    import_module, "turnstile_server.workers.assembly", abandon_on_cancel=True
                )
                starting.app.describe(import_module("turnstile_server.control.openenv").descriptions())
                async with AsyncExitStack() as stack:
                    front = await build.open_front(settings, sockets, stack, progress)
                    starting.app.attach(front.joined.app)
                    listener.last_words = front.joined.stopping.cut
                    try:
                        ready = {
                            "event": "ready",
                            "pid": os.getpid(),
                            "control_url": loopback_url(control_url),
                            "agent_url": front.agent_url,
                            "sandboxes": front.sandboxes,
                            "data_dir": str(settings.data_dir),
                            "journal": front.journal,
                            "tasks_left_out": front.tasks_left_out,
                            "workers": front.told,
                        }
                        yield ready, front.joined.drain
                    finally:
                        front.joined.closing.set()
                        starting.app.abandon()
                        listener.stop()
            finally:
                starting.app.abandon()
                listener.stop()


class _Starting:
    """The app that the control listener serves during the start, and its progress."""

    def __init__(self, settings: Settings) -> None:
        self.progress = StartProgress()
        self.app = StartingApp(self.progress, settings.start_wait_s, probes=True)


def _control_listener(settings: Settings, sockets: ExitStack) -> tuple[Listener, _Starting, str]:
    control = bind("control", settings.control.host, settings.control.port)
    sockets.callback(control.close)
    shares = raise_descriptor_limit(settings)
    starting = _Starting(settings)
    listener = Listener(
        starting.app,
        control,
        idle_s=settings.gate.idle_connection_s,
        grace_s=settings.shutdown_grace_s + _MORE_GRACE_S,
        access_log=True,
        limits=ConnectionLimits.of(settings.control, shares.control),
        name="the control API",
        reserve=settings.control.bounds_of(ListenerBounds).reserved_descriptors,
        ping_interval_s=settings.openenv.bounds_of(ListenerBounds).ping_interval_s,
        ping_timeout_s=settings.openenv.bounds_of(ListenerBounds).ping_timeout_s,
    )
    return listener, starting, url_of(control)


async def _shielded_serve(listener: Listener) -> None:
    with anyio.CancelScope(shield=True):  # it ends by ``stop``
        await listener.serve()


def prepared(settings: Settings) -> Path:
    """The folder of the workers in the data directory, which is tried first. Raises StartupError."""
    prepare_data_dir(settings.data_dir, settings.journal.min_free_bytes)
    folder = settings.data_dir / WORKERS
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise StartupError(f"the folder of the workers, {folder}, cannot be made: {error}") from error
    return folder
