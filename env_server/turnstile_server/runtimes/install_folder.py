"""A folder of installed things, each in a folder of its own that appears whole or not at all.

Several servers may share it: who is second takes what the first has made.
"""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
from collections import defaultdict
from collections.abc import Awaitable, Callable
from pathlib import Path

import anyio
import anyio.to_thread

from turnstile_server.errors import AgentNotInstalled

_LOG = logging.getLogger(__name__)


def default_install_dir() -> Path:
    """``turnstile/agents`` in the user's cache folder (XDG Base Directory Specification)."""
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "turnstile" / "agents"


class InstallFolder:
    """``path`` is absolute, and made with the first thing in it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._locks: defaultdict[str, anyio.Lock] = defaultdict(anyio.Lock)

    def exists(self, name: str) -> bool:
        return (self.path / name).is_dir()

    async def fill_once(self, name: str, fill: Callable[[Path], Awaitable[None]]) -> None:
        """Make the folder ``name`` unless it exists: fill a temporary folder, then rename it.

        Callers that ask for the same one meanwhile wait for it. Raises AgentNotInstalled, and what ``fill``
        raises.
        """
        async with self._locks[name]:
            if self.exists(name):
                return
            _LOG.info("installing %s", name)
            try:
                await anyio.to_thread.run_sync(lambda: self.path.mkdir(parents=True, exist_ok=True))
                partial = Path(await anyio.to_thread.run_sync(lambda: tempfile.mkdtemp(dir=self.path, prefix=".")))
            except OSError as error:
                raise AgentNotInstalled(
                    f"agents cannot be installed into {self.path} by uid {os.geteuid()}: {error.strerror}; "
                    "make it writable, or name another folder (agents.install_dir)"
                ) from error
            try:
                await fill(partial)
                await anyio.to_thread.run_sync(self._publish, name, partial)
            finally:
                with anyio.CancelScope(shield=True):
                    await anyio.to_thread.run_sync(lambda: shutil.rmtree(partial, ignore_errors=True))

    def _publish(self, name: str, partial: Path) -> None:
        partial.chmod(0o755)  # other users read it, through a read-only mount
        try:
            partial.rename(self.path / name)
        except OSError as error:
            if not self.exists(name):  # another server may have been faster
                raise AgentNotInstalled(f"{name} cannot be put into {self.path}: {error}") from error
