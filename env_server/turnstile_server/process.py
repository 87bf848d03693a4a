"""The server as a process: its two listeners, its signals, its exit code.

``run`` is what ``turnstile serve`` calls. Everything behind the listeners is built by ``app.py``.
"""

from __future__ import annotations

import gc
import json
import logging
import signal
import sys
from contextlib import AsyncExitStack
from dataclasses import dataclass

import anyio

from turnstile_server.app import model_folder, open_apps
from turnstile_server.control.agent_address import loopback_url
from turnstile_server.errors import StartupError
from turnstile_server.http.listeners import Listener, bind, url_of
from turnstile_server.settings import Settings


def run(settings: Settings) -> int:
    """Serves, and returns the exit code: 0 after a requested stop, 2 when the server could not start."""
    logging.basicConfig(
        level=settings.log_level.upper(),
        stream=sys.stderr,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
    )
    code = 0
    try:
        anyio.run(serve, settings, backend_options={"use_uvloop": True})
    except* StartupError as group:
        for error in _leaves(group):
            sys.stderr.write(f"turnstile: {error}\n")
        code = 2
    return code


def _leaves(group: BaseExceptionGroup[StartupError]) -> list[StartupError]:
    found: list[StartupError] = []
    for error in group.exceptions:
        found.extend(_leaves(error) if isinstance(error, BaseExceptionGroup) else [error])
    return found


async def serve(settings: Settings) -> None:
    """Runs a server until SIGINT or SIGTERM, which also cut off a start. Prints one line of JSON when both
    listeners accept connections."""
    stop, started, starting = anyio.Event(), anyio.Event(), anyio.CancelScope()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(_on_signal, stop, started, starting)
        with starting:
            async with AsyncExitStack() as stack:
                server = await start(settings, stack)
                started.set()
                _announce(settings, server)
                await server.serve(stop)
        tasks.cancel_scope.cancel()


def _announce(settings: Settings, server: Server) -> None:
    # Objects made by the start live as long as the process. Frozen, they are left out of later garbage
    # collections, which would otherwise take a tenth of a second each, in the middle of a call.
    gc.collect()
    gc.freeze()
    ready = {
        "event": "ready",
        "control_url": server.control_url,
        "agent_url": server.agent_url,
        "sandboxes": server.sandboxes,
        "data_dir": str(settings.data_dir),
    }
    sys.stdout.write(json.dumps(ready) + "\n")
    sys.stdout.flush()


async def _on_signal(stop: anyio.Event, started: anyio.Event, starting: anyio.CancelScope) -> None:
    """Stops a running server; cancels one that is still starting."""
    with anyio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
        async for _ in signals:
            stop.set()
            if not started.is_set():
                starting.cancel()


@dataclass(frozen=True, slots=True)
class Server:
    """A started server, with two listeners that do not accept connections before ``serve``."""

    control: Listener
    agent: Listener
    control_url: str
    agent_url: str
    sandboxes: str
    """Kind of the sandboxes: docker, local or none."""
    closing: anyio.Event

    async def serve(self, stop: anyio.Event) -> None:
        """Serves both applications until ``stop`` is set."""
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self.control.serve)
            tasks.start_soon(self.agent.serve)
            await stop.wait()
            self.closing.set()
            self.control.stop()
            self.agent.stop()


async def start(settings: Settings, stack: AsyncExitStack) -> Server:
    """Builds and starts everything; ``stack`` owns what was started. Raises StartupError."""
    model_dir = model_folder(settings)
    control_socket = bind("control", settings.control.host, settings.control.port)
    stack.callback(control_socket.close)
    agent_socket = bind("agent", settings.gate.host, settings.gate.port)
    stack.callback(agent_socket.close)
    apps = await open_apps(settings, model_dir, url_of(agent_socket), stack)
    idle_s, grace_s = settings.gate.idle_connection_s, settings.shutdown_grace_s
    return Server(
        control=Listener(
            apps.control,
            control_socket,
            idle_s=idle_s,
            grace_s=grace_s,
            access_log=True,
            ping_interval_s=settings.openenv.ping_interval_s,
            ping_timeout_s=settings.openenv.ping_timeout_s,
        ),
        agent=Listener(apps.agent, agent_socket, idle_s=idle_s, grace_s=grace_s, access_log=False),
        control_url=loopback_url(url_of(control_socket)),
        agent_url=settings.gate.public_url or loopback_url(url_of(agent_socket)),
        sandboxes=apps.sandboxes,
        closing=apps.closing,
    )
