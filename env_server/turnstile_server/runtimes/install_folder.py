"""A folder of installed things, each in a folder of its own that appears whole or not at all.

Several servers may share it: who is second takes what the first has made. What is being filled is locked by the
server that does it, so that the next one tells what a kill has left, and removes that.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import secrets
import shutil
import tempfile
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable
from pathlib import Path

import anyio
import anyio.to_thread

from turnstile_server.errors import AgentNotInstalled

_LOG = logging.getLogger(__name__)
_PARTIAL = ".partial-"
"""Begins the name of a folder that is not whole."""
_FRESH_S = 86400.0
"""No setting: one that is younger is never taken for left, also without a lock: another host may fill it."""


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

        Callers that ask for the same one meanwhile wait for it. A cancellation, as at a shutdown, ends the
        programs that ``fill`` runs, and waits for a thread of it that copies files. Raises AgentNotInstalled, and
        what ``fill`` raises.
        """
        async with self._locks[name]:
            if self.exists(name):
                return
            _LOG.info("installing %s", name)
            try:
                partial, lock = await anyio.to_thread.run_sync(self._begin)
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
                    await anyio.to_thread.run_sync(remove_tree, partial)
                os.close(lock)

    def remove(self, name: str) -> bool:
        """Removes the folder, unless somebody holds a lock of it, or has removed it. False: it is not removed."""
        folder = self.path / name
        try:
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        except OSError:
            return False
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            remove_tree(folder.rename(self.path / f"{_PARTIAL}{secrets.token_hex(4)}"))
        except OSError:
            return False
        finally:
            os.close(lock)
        return True

    def _begin(self) -> tuple[Path, int]:
        """A new folder to fill, and the descriptor that locks it until it is closed. Raises OSError."""
        self.path.mkdir(parents=True, exist_ok=True)
        for left in self.path.glob(f"{_PARTIAL}*"):
            self._sweep(left)
        partial = Path(tempfile.mkdtemp(dir=self.path, prefix=_PARTIAL))
        try:
            lock = os.open(partial, os.O_RDONLY | os.O_DIRECTORY)
        except OSError:
            partial.rmdir()
            raise
        with contextlib.suppress(OSError):  # a file system without locks: nothing is ever taken for left on it
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return partial, lock

    def _sweep(self, folder: Path) -> None:
        """Removes what a kill left. One that a server fills is locked."""
        try:
            if folder.stat().st_mtime > time.time() - _FRESH_S:
                return
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        except OSError:
            return
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            remove_tree(folder)
            _LOG.info("removed %s, which an installation left that was killed", folder)
        except OSError:
            pass
        finally:
            os.close(lock)

    def _publish(self, name: str, partial: Path) -> None:
        partial.chmod(0o755)  # other users read it, through a read-only mount
        try:
            partial.rename(self.path / name)
        except OSError as error:
            if not self.exists(name):  # another server may have been faster
                raise AgentNotInstalled(f"{name} cannot be put into {self.path}: {error}") from error


def remove_tree(path: Path) -> None:
    """Removes a tree, as far as that is allowed; folders in it may be closed to their owner."""
    for folder, below, _ in os.walk(path):
        for each in (os.path.join(folder, name) for name in below):
            if not os.path.islink(each):
                with contextlib.suppress(OSError):
                    os.chmod(each, 0o700)
    shutil.rmtree(path, ignore_errors=True)
