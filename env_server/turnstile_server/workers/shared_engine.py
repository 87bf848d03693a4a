"""An engine that the server starts itself, once for all workers: the process in front has it.

The embedded engine, and engines of ``--launch``. The workers attach to it as to one that runs elsewhere, so that
the death of a worker is nothing to it. What must hold: it is gone when ``close`` returns; its address stays the
same for as long as the server lives, also when it is started again.
"""

from __future__ import annotations

import socket
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path

import anyio

from turnstile_server.engines.embedded.process import WorkerProcess
from turnstile_server.engines.launch.command import HOST
from turnstile_server.engines.launch.supervisor import EngineProcess
from turnstile_server.settings import Settings

_EMBEDDED = "embedded"


async def start_shared_engine(
    settings: Settings, model_dir: Path, stack: AsyncExitStack, tell: Callable[[str], None]
) -> Settings:
    """Starts what the settings say that the server starts, and returns those with which a worker attaches to it.
    ``stack`` ends it. Raises StartupError."""
    if settings.launch.enabled:
        return await _launched(settings, model_dir, stack, tell)
    if settings.engine.kind == _EMBEDDED and settings.engine.socket is None:
        return await _embedded(settings, model_dir, stack)
    return settings


async def _embedded(settings: Settings, model_dir: Path, stack: AsyncExitStack) -> Settings:
    process = WorkerProcess(model_dir, settings.engine)
    stack.push_async_callback(_shielded, process.close)
    await process.start()
    engine = settings.engine.model_copy(update={"socket": process.socket})
    return settings.model_copy(update={"engine": engine})


async def _launched(
    settings: Settings, model_dir: Path, stack: AsyncExitStack, tell: Callable[[str], None]
) -> Settings:
    urls: list[str] = []
    for replica in range(settings.launch.replicas):
        port = (
            settings.launch.port or free_port() - replica
        )  # a new one after each restart would be news to nobody
        launch = settings.launch.model_copy(update={"port": port})
        process = EngineProcess(settings.engine, launch, model_dir, replica=replica, tell=tell)
        stack.push_async_callback(_shielded, process.stop)
        urls.append(await process.start())
    engine = settings.engine.model_copy(update={"url": None, "urls": tuple(urls)})
    launch = settings.launch.model_copy(update={"enabled": False})
    return settings.model_copy(update={"engine": engine, "launch": launch})


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port: int = probe.getsockname()[1]
        return port


async def _shielded(close: Callable[[], Awaitable[None]]) -> None:
    with anyio.CancelScope(shield=True):
        await close()
