"""The server as a process: its two listeners, its signals, its exit code.

``run`` is what ``turnstile serve`` calls. The listeners accept connections at once. Everything behind them is
imported and built by ``app.py`` meanwhile; ``http/starting.py`` says what they serve until then. One of several
worker processes runs the same, on sockets that the process in front of it has bound (``workers/``).
"""

from __future__ import annotations

import gc
import json
import logging
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

import anyio
import anyio.to_thread

from turnstile.visible import visible
from turnstile_server.control.agent_address import loopback_url
from turnstile_server.errors import StartupError
from turnstile_server.http.bounds import ListenerBounds
from turnstile_server.http.connections import ConnectionLimits
from turnstile_server.http.descriptors import raise_descriptor_limit
from turnstile_server.http.draining import Draining, StopSignals, until_end
from turnstile_server.http.listeners import Listener, bind, url_of
from turnstile_server.http.starting import StartingApp, StartProgress
from turnstile_server.observability.log_lines import LogFormatter, WithoutLooks
from turnstile_server.observability.standstill import ended_at_standstill
from turnstile_server.settings import Settings

if TYPE_CHECKING:
    from turnstile_server.app import Apps

SWITCH_INTERVAL_S = 0.001
"""A thread that reads or renders a huge prompt gives the interpreter to the event loop after this, not after
Python's 5 ms. A small call takes the interpreter back a dozen times, after each wait: docs/performance.md has what
this gains."""


@dataclass(frozen=True, slots=True)
class Inherited:
    """The sockets and the event channel that a worker process gets from the process in front. Only the process in
    front reports to the user."""

    control: socket.socket
    agent: socket.socket
    agent_url: str
    """The agent listener's address, as it is handed out."""
    label: str
    """Which worker it is, for its log."""
    tell: Callable[[dict[str, object]], None]
    """Takes one event: that it is ready, or why it cannot start."""


def run(settings: Settings, inherited: Inherited | None = None) -> int:
    """Serves, and returns the exit code: 0 after a requested stop, 2 when the server could not start."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(LogFormatter("" if inherited is None else inherited.label))
    handler.addFilter(WithoutLooks())
    logging.basicConfig(level=settings.log_level.upper(), handlers=[handler])
    if settings.log_level == "info":  # a line for each call of a hosted model says nothing that a turn does not
        logging.getLogger("httpx2").setLevel(logging.WARNING)
    code = 0
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    try:
        anyio.run(serve, settings, inherited, backend_options={"use_uvloop": True})
    except* StartupError as group:
        for error in startup_errors(group):
            if inherited is None:
                tell_refusal(error)
            else:
                inherited.tell({"event": "failed", "message": error.message})
        code = 2
    return code


def tell_refusal(error: StartupError) -> None:
    sys.stderr.write(visible(f"turnstile: {error}", lines=True) + "\n")


def startup_errors(group: BaseExceptionGroup[StartupError]) -> list[StartupError]:
    found: list[StartupError] = []
    for error in group.exceptions:
        found.extend(startup_errors(error) if isinstance(error, BaseExceptionGroup) else [error])
    return found


async def serve(settings: Settings, inherited: Inherited | None = None) -> None:
    """Runs a server until it is to end (``until_end``); a signal also cuts off a start. Says when it is ready
    (``say_ready``): both listeners serve all that they have."""
    signals, started, starting = StopSignals(), anyio.Event(), anyio.CancelScope()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(on_signal, signals, started, starting)
        with starting:
            async with running(settings, inherited) as server, ended_at_standstill(settings.standstill_s):
                started.set()
                _announce(settings, server, say_ready if inherited is None else inherited.tell)
                if await until_end(
                    signals, server.drain, settings.shutdown_grace_s, ends_itself=inherited is None
                ):
                    server.cut()
        tasks.cancel_scope.cancel()


def _announce(settings: Settings, server: Server, tell: Callable[[dict[str, object]], None]) -> None:
    freeze_what_is_there()
    ready: dict[str, object] = {
        "event": "ready",
        "pid": os.getpid(),
        "control_url": server.control_url,
        "agent_url": server.agent_url,
        "sandboxes": server.sandboxes,
        "data_dir": str(settings.data_dir),
        "journal": server.journal,
        "tasks_left_out": server.tasks_left_out,
    }
    tell(ready)


def freeze_what_is_there() -> None:
    """Objects made by the start live as long as the process. Frozen, they are left out of later garbage
    collections, which would otherwise take a tenth of a second each, in the middle of a call."""
    gc.collect()
    gc.freeze()


def say_ready(event: dict[str, object]) -> None:
    """One line of JSON, for the program that started the server; on a terminal, lines for a person."""
    sys.stdout.write(ready_text(event) if sys.stdout.isatty() else json.dumps(event) + "\n")
    sys.stdout.flush()


def ready_text(event: Mapping[str, object]) -> str:
    """The facts of the event that a person needs next."""
    control = str(event["control_url"])
    facts = {
        "control API": f"{control}, with the control key",
        "viewer": f"{control}/ui, which `turnstile ui --url {control} --data-dir {event['data_dir']}` opens",
        "agents": event["agent_url"],
        "sandboxes": event["sandboxes"],
        "data": event["data_dir"],
        "end": "Ctrl-C",
    }
    lines = "".join(f"  {name:<12} {fact}\n" for name, fact in facts.items())
    return visible(f"Turnstile is ready.\n{lines}", lines=True)


async def on_signal(signals: StopSignals, started: anyio.Event, starting: anyio.CancelScope) -> None:
    """Takes the signals of a running server; cancels one that is still starting."""
    with anyio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as received:
        async for number in received:
            signals.take(number)
            if not started.is_set():
                starting.cancel()


@dataclass(frozen=True, slots=True)
class Server:
    """A server that is ready."""

    control_url: str
    agent_url: str
    drain: Draining | None
    """None without a model: there is nothing to drain."""
    cut: Callable[[], None]
    """Ends the requests in progress."""
    sandboxes: str
    """Kind of the sandboxes: docker, local or none."""
    journal: str = ""
    """One line about the journal's directory and what bounds it."""
    tasks_left_out: bool = False
    """Some tasks of its folders cannot be used."""


@asynccontextmanager
async def running(settings: Settings, inherited: Inherited | None = None) -> AsyncIterator[Server]:
    """A server for the length of the block, which begins when it is ready. Raises StartupError.

    At the end requests in progress get ``shutdown_grace_s``; then what is behind the listeners is released.
    """
    async with _listening(settings, inherited) as listeners, AsyncExitStack() as stack:
        apps = await _build(settings, listeners, stack, is_worker=inherited is not None)
        listeners.attach(apps)
        try:
            yield Server(
                control_url=loopback_url(listeners.control_url) if inherited is None else "",
                agent_url=settings.gate.public_url or loopback_url(listeners.agent_url),
                drain=apps.drain,
                cut=apps.stopping.cut,
                sandboxes=apps.sandboxes,
                journal=apps.journal,
                tasks_left_out=apps.tasks_left_out,
            )
        finally:
            apps.closing.set()
            with anyio.CancelScope(shield=True):
                await listeners.close()


async def _build(settings: Settings, listeners: Listeners, stack: AsyncExitStack, *, is_worker: bool) -> Apps:
    # Imported only now, and in a thread: it takes seconds on a small machine, in which connections are accepted.
    app = await anyio.to_thread.run_sync(import_module, "turnstile_server.app", abandon_on_cancel=True)
    listeners.describe(import_module("turnstile_server.control.openenv").descriptions())  # which came with it
    model_dir = import_module("turnstile_server.model_files").model_folder(settings)  # which came with it
    apps: Apps = await app.open_apps(
        settings, model_dir, listeners.agent_url, stack, progress=listeners.progress, is_worker=is_worker
    )
    return apps


class Listeners:
    """Both listeners: they accept connections, and serve the applications once these are attached."""

    def __init__(self, settings: Settings, sockets: ExitStack, inherited: Inherited | None = None) -> None:
        """Binds the sockets that are not inherited; ``sockets`` closes them. Raises StartupError."""
        if inherited is None:
            control = bind("control", settings.control.host, settings.control.port)
            sockets.callback(control.close)
            agent = bind("agent", settings.gate.host, settings.gate.port)
            self.control_url, self.agent_url = url_of(control), url_of(agent)
        else:
            control, agent = inherited.control, inherited.agent
            sockets.callback(control.close)
            self.control_url, self.agent_url = "", inherited.agent_url
        sockets.callback(agent.close)
        self.progress = StartProgress()
        self._control_app = StartingApp(self.progress, settings.start_wait_s, probes=True)
        self._agent_app = StartingApp(self.progress, settings.start_wait_s, probes=False)
        idle_s, grace_s = settings.gate.idle_connection_s, settings.shutdown_grace_s
        shares = raise_descriptor_limit(settings)
        self._control = Listener(
            self._control_app,
            control,
            idle_s=idle_s,
            grace_s=grace_s,
            access_log=inherited is None,
            limits=ConnectionLimits.of(settings.control, shares.control),
            name="the control API",
            reserve=settings.control.bounds_of(ListenerBounds).reserved_descriptors,
            ping_interval_s=settings.openenv.bounds_of(ListenerBounds).ping_interval_s,
            ping_timeout_s=settings.openenv.bounds_of(ListenerBounds).ping_timeout_s,
        )
        self._agent = Listener(
            self._agent_app,
            agent,
            idle_s=idle_s,
            grace_s=grace_s,
            access_log=False,
            limits=ConnectionLimits.of(settings.gate, shares.agents),
            name="the agent listener",
            websockets=False,
        )
        self._closed = anyio.Event()

    def describe(self, descriptions: Mapping[str, Any]) -> None:
        self._control_app.describe(descriptions)

    def attach(self, apps: Apps) -> None:
        self._control_app.attach(apps.control)
        self._agent_app.attach(apps.agent)
        self._control.last_words = self._agent.last_words = apps.stopping.cut

    async def serve(self) -> None:
        """Serves until ``close``. A cancellation from outside does not cut off requests in progress."""
        with anyio.CancelScope(shield=True):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._control.serve)
                tasks.start_soon(self._agent.serve)
        self._closed.set()

    async def close(self) -> None:
        """Stops accepting; returns when the requests in progress have ended or used up their time."""
        for app, listener in ((self._control_app, self._control), (self._agent_app, self._agent)):
            app.abandon()
            listener.stop()
        await self._closed.wait()


@asynccontextmanager
async def _listening(settings: Settings, inherited: Inherited | None) -> AsyncIterator[Listeners]:
    """Listeners that serve for the length of the block, however it is left."""
    with ExitStack() as sockets:
        listeners = Listeners(settings, sockets, inherited)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(listeners.serve)
            try:
                yield listeners
            finally:
                with anyio.CancelScope(shield=True):
                    await listeners.close()
