"""``turnstile ui FOLDER``: the viewer on a directory that no server uses.

The client's command finds this function by its entry point in the group ``turnstile.viewers``.
"""

from __future__ import annotations

import logging
import secrets
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import anyio
import anyio.to_thread

from turnstile_server.errors import StartupError
from turnstile_server.http.connections import ConnectionLimits
from turnstile_server.http.listeners import Listener, bind, url_of
from turnstile_server.observability.log_lines import LogFormatter
from turnstile_server.offline_app import open_offline_app
from turnstile_server.settings import Settings, load_settings

_HOST = "127.0.0.1"
Ready = Callable[[str, str], None]
"""Is told the address of the control API and its key, in a thread, when both are served."""


def view_folder(folder: Path, model: Path | None, ready: Ready) -> None:
    """Serves the viewer on a free port of 127.0.0.1, with a key for this time, until SIGINT or SIGTERM. Changes
    nothing in ``folder``, and leaves nothing.

    ``model``: the folder with the tokenizer; None: that of the settings (TURNSTILE_MODEL), if they name one.
    Raises ValueError, with a sentence for people, where nothing can be viewed.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(LogFormatter())
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
    refused: list[StartupError] = []
    try:
        settings = load_settings({} if model is None else {"model": model})
        anyio.run(_serve, folder, settings, ready)
    except* StartupError as group:
        refused.extend(error for error in group.exceptions if isinstance(error, StartupError))
    if refused:
        raise ValueError(refused[0].message)


async def _serve(folder: Path, settings: Settings, ready: Ready) -> None:
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(_end_on_signal, tasks.cancel_scope)
        async with AsyncExitStack() as stack:
            key, closing = secrets.token_urlsafe(24), anyio.Event()
            app = await open_offline_app(folder, key, settings, closing, stack)
            bound = bind("control", _HOST, 0)
            stack.callback(bound.close)
            listener = Listener(
                app,
                bound,
                idle_s=settings.gate.idle_connection_s,
                grace_s=settings.shutdown_grace_s,
                access_log=False,
                limits=ConnectionLimits.of(settings.control, settings.control.max_connections),
                websockets=False,
            )
            await stack.enter_async_context(_listening(listener, closing))
            await anyio.to_thread.run_sync(ready, url_of(bound), key, abandon_on_cancel=True)
            await anyio.sleep_forever()


async def _end_on_signal(viewing: anyio.CancelScope) -> None:
    with anyio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
        async for _ in signals:
            viewing.cancel()


@asynccontextmanager
async def _listening(listener: Listener, closing: anyio.Event) -> AsyncIterator[None]:
    async def serve() -> None:
        with anyio.CancelScope(shield=True):  # it ends by ``stop``
            await listener.serve()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(serve)
        try:
            yield
        finally:
            closing.set()
            listener.stop()
