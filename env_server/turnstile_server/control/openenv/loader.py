"""``openenv-core``, imported once, in a thread, when somebody needs it.

The package imports a web user interface with it and takes seconds. So no module that the server starts with
imports it, and the event loop goes on while it is imported. A server without it answers 501 and says what to
install.
"""

from __future__ import annotations

import gc
import importlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import anyio
import anyio.to_thread

from turnstile_server.control.openenv.parts import OpenEnvParts
from turnstile_server.errors import NotInstalled, TurnstileError

if TYPE_CHECKING:
    from turnstile_server.control.openenv.door import OpenEnvDoor

DOOR = "turnstile_server.control.openenv.door"


class DoorLoader:
    """Gives the one OpenEnvDoor. ``module`` is where it is (a test names one that cannot be imported)."""

    def __init__(self, parts: OpenEnvParts, module: str = DOOR) -> None:
        self._parts = parts
        self._module = module
        self._door: OpenEnvDoor | None = None
        self._loading = anyio.Lock()

    async def door(self) -> OpenEnvDoor:
        """Raises NotInstalled where ``openenv-core`` is not there, or cannot be imported."""
        if self._door is None:
            async with self._loading:
                if self._door is None:
                    # A caller that leaves does not wait; the import ends by itself, and the next one finds it.
                    self._door = await anyio.to_thread.run_sync(self._load, abandon_on_cancel=True)
        return self._door

    def _load(self) -> OpenEnvDoor:
        try:
            module = importlib.import_module(self._module)
        except ImportError as error:
            raise NotInstalled(
                f"this server cannot speak OpenEnv: {error}. Install openenv-core==0.3.0 beside it, or the extra "
                "'server' of turnstile-rl; the REST routes (/episodes) work without it"
            ) from error
        # It lives as long as the process: a full collection need not walk it in the middle of somebody's call.
        gc.freeze()
        door: OpenEnvDoor = module.OpenEnvDoor(self._parts)
        return door


@asynccontextmanager
async def preloading(loader: DoorLoader, wanted: bool) -> AsyncIterator[None]:
    """Loads in the background, where ``wanted``; a failure is told to whoever asks later."""

    async def load() -> None:
        try:
            await loader.door()
        except TurnstileError:
            return

    async with anyio.create_task_group() as tasks:
        if wanted:
            tasks.start_soon(load)
        yield
        tasks.cancel_scope.cancel()
