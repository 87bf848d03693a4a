"""``openenv-core``, imported once, in a worker thread, at the first request that needs it.

The package takes a second to import, and four with its web interface (gradio, pandas), which it imports where that
is installed. So no module that the server starts with imports it, the web interface is kept out, and the event
loop keeps running during the import. A server without the package answers 501 and says what to install.
"""

from __future__ import annotations

import gc
import importlib
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from types import ModuleType
from typing import TYPE_CHECKING

import anyio
import anyio.to_thread

from turnstile_server.control.openenv.openenv_parts import OpenEnvParts
from turnstile_server.errors import NotInstalled, TurnstileError

if TYPE_CHECKING:
    from turnstile_server.control.openenv.server import OpenEnvServer

SERVER = "turnstile_server.control.openenv.server"
"""The module that needs ``openenv-core``."""


class OpenEnvLoader:
    """Holds the one OpenEnvServer. ``module`` is where it is (a test names one that cannot be imported)."""

    def __init__(self, parts: OpenEnvParts, module: str = SERVER) -> None:
        self._parts = parts
        self._module = module
        self._server: OpenEnvServer | None = None
        self._loading = anyio.Lock()

    async def server(self) -> OpenEnvServer:
        """Raises NotInstalled if ``openenv-core`` is missing or cannot be imported."""
        if self._server is None:
            async with self._loading:
                if self._server is None:
                    # A caller that leaves does not wait. The import goes on, and the next caller finds it done.
                    self._server = await anyio.to_thread.run_sync(self._load, abandon_on_cancel=True)
        return self._server

    def _load(self) -> OpenEnvServer:
        module = import_openenv(self._module)
        # The package stays for the life of the process: later garbage collections need not visit its objects.
        gc.freeze()
        server: OpenEnvServer = module.OpenEnvServer(self._parts)
        return server


def import_openenv(module: str) -> ModuleType:
    """Import a module of ours that needs ``openenv-core``. Takes a second or more: call it in a worker thread.

    Raises NotInstalled if ``openenv-core`` is missing or cannot be imported.
    """
    try:
        with _not_imported("gradio"):
            return importlib.import_module(module)
    except ImportError as error:
        raise NotInstalled(
            f"this server cannot speak OpenEnv: {error}. Install openenv-core==0.3.0 beside it, or the extra "
            "'server' of turnstile-rl; the REST routes (/episodes) work without it"
        ) from error


@contextmanager
def _not_imported(name: str) -> Iterator[None]:
    """Make ``import name`` fail as if the package were not installed, unless it is imported already.

    None in ``sys.modules`` is Python's own way to say so. openenv-core then goes without its web interface.
    """
    if name in sys.modules:
        yield
        return
    sys.modules[name] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules[name]


@asynccontextmanager
async def preloading(loader: OpenEnvLoader, wanted: bool) -> AsyncIterator[None]:
    """Load in the background if ``wanted``. A failure is raised at the first request that needs the package."""

    async def load() -> None:
        try:
            await loader.server()
        except TurnstileError:
            return

    async with anyio.create_task_group() as tasks:
        if wanted:
            tasks.start_soon(load)
        yield
        tasks.cancel_scope.cancel()
