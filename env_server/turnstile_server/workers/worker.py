"""The program of a worker process: a whole server on sockets that the process in front has bound.

``python -m turnstile_server.workers.worker``, with its orders on stdin. What must hold: it dies with the process
in front, at once and however that ends, as all of one server dies at once; what it has acknowledged is durable
by then. stdout has one line of JSON: that it is ready, or why it cannot start.
"""

from __future__ import annotations

import ctypes
import json
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable
from contextlib import AsyncExitStack

import anyio

from turnstile_server.errors import StartupError
from turnstile_server.http.connections import ConnectionLimits
from turnstile_server.http.descriptors import raise_descriptor_limit
from turnstile_server.http.listeners import Listener
from turnstile_server.observability.log_lines import LogFormatter
from turnstile_server.offline_app import open_offline_app
from turnstile_server.process import Inherited, run, startup_errors
from turnstile_server.workers.orders import WorkerOrders, read_orders

PARENT = "TURNSTILE_FRONT_PID"
"""The variable that names the process in front."""
Tell = Callable[[dict[str, object]], None]
_PR_SET_PDEATHSIG = 1


def main() -> int:
    die_with_parent(int(os.environ.pop(PARENT)))
    orders = read_orders(sys.stdin.buffer)
    tell = status_line()
    control = socket.socket(fileno=orders.control)
    if orders.archives or orders.agent is None:
        return show_archives(orders, control, tell)
    agent = socket.socket(fileno=orders.agent)
    return run(orders.all_settings(), Inherited(control, agent, orders.agent_url, orders.label, tell))


def status_line() -> Tell:
    """Return a function that writes an event to the process in front. All other output goes to stderr, because
    nobody reads the rest of stdout."""
    status = os.dup(sys.stdout.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

    def tell(event: dict[str, object]) -> None:
        os.write(status, json.dumps(event).encode() + b"\n")

    return tell


def die_with_parent(parent: int) -> None:
    """SIGKILL for this process when its parent ends (prctl(2)): also one that stands still dies then."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it had ended before
        os._exit(70)


def show_archives(orders: WorkerOrders, control: socket.socket, tell: Tell) -> int:
    """Serves the journals of workers that there are no more, for reading, until SIGTERM."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(LogFormatter(orders.label))
    settings = orders.all_settings()
    logging.basicConfig(level=settings.log_level.upper(), handlers=[handler])
    code = 0
    try:
        anyio.run(_serve, orders, control, tell, backend_options={"use_uvloop": True})
    except* StartupError as group:
        for error in startup_errors(group):
            tell({"event": "failed", "message": error.message})
        code = 2
    return code


async def _serve(orders: WorkerOrders, control: socket.socket, tell: Tell) -> None:
    settings = orders.all_settings()
    shares = raise_descriptor_limit(settings)
    closing = anyio.Event()
    async with AsyncExitStack() as stack:
        stack.callback(control.close)
        app = await open_offline_app(orders.archives, orders.key, settings, closing, stack, is_worker=True)
        listener = Listener(
            app,
            control,
            idle_s=settings.gate.idle_connection_s,
            grace_s=settings.shutdown_grace_s,
            access_log=False,
            limits=ConnectionLimits.of(settings.control, shares.control),
            websockets=False,
        )
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_stop_on_signal, listener, closing)
            tell({"event": "ready", "pid": os.getpid()})
            await listener.serve()
            tasks.cancel_scope.cancel()


async def _stop_on_signal(listener: Listener, closing: anyio.Event) -> None:
    with anyio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
        async for _ in signals:
            closing.set()
            listener.stop()


if __name__ == "__main__":
    sys.exit(main())
