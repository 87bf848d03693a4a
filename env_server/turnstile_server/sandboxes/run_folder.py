"""The folder of a server's sandboxes on the host: its lock, for as long as the server runs, and removing from it.

What must hold: only the server's user can enter it; no other server uses it at the same time, because the sweep of
one would end the sandboxes of the other.
"""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
from functools import partial
from pathlib import Path

import anyio
import anyio.to_thread

from turnstile_server.errors import StartupError
from turnstile_server.sandboxes.background import through_shortages
from turnstile_server.shortages import exhausted_by, is_shortage

_LOG = logging.getLogger(__name__)
MAX_FOLDER_PATH = 107 - len("/sb-0123456789ab/helper.sock")
"""Bytes of the folder's path, at most: unix(7) allows 107 for a socket below it."""


class RunFolderUnusable(StartupError):
    """The folder of the sandboxes' sockets cannot be used; no backend can do without it."""


class RunFolder:
    """A folder and its lock. ``take`` makes and locks it; ``give_back`` may be called at any time, and again."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock: int | None = None

    @property
    def taken(self) -> bool:
        return self._lock is not None

    def take(self) -> None:
        """Raises RunFolderUnusable; then nothing is held."""
        length = len(os.fsencode(self.path))
        if length > MAX_FOLDER_PATH:
            raise RunFolderUnusable(
                f"the folder of the sandboxes' sockets, {self.path}, has a path of {length} bytes, and "
                f"{MAX_FOLDER_PATH} are the most for a Unix socket below it; choose a shorter sandboxes.run_dir"
            )
        try:
            self._lock = _locked(self.path)
        except OSError as error:
            raise unusable(self.path, error) from error

    def give_back(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def unusable(run_dir: Path, error: OSError) -> RunFolderUnusable:
    return RunFolderUnusable(
        f"the folder of the sandboxes' sockets, {run_dir}, cannot be used by uid {os.geteuid()}: "
        f"{error.strerror}; choose another with sandboxes.run_dir"
    )


def _locked(run_dir: Path) -> int:
    """Makes and locks the folder; its descriptor. The lock lasts as long as it is open."""
    run_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder = os.open(run_dir, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        # In /tmp anyone can make a folder of this name first.
        if os.fstat(folder).st_uid != os.geteuid():
            raise RunFolderUnusable(
                f"the folder of the sandboxes' sockets, {run_dir}, belongs to uid {os.fstat(folder).st_uid}, and "
                f"the server runs as uid {os.geteuid()}; choose another with sandboxes.run_dir"
            )
        os.fchmod(folder, 0o700)
        try:
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise RunFolderUnusable(
                f"another server has its sandboxes in {run_dir}; choose another with sandboxes.run_dir"
            ) from error
    except BaseException:
        os.close(folder)
        raise
    return folder


async def remove_folder(folder: Path) -> None:
    """Removes a sandbox's folder, as far as it can be removed; it may be gone already."""
    try:
        await through_shortages(partial(anyio.to_thread.run_sync, _remove, folder))
    except Exception as error:
        if not is_shortage(error):
            raise
        _LOG.error("the folder %s cannot be removed: %s", folder, exhausted_by(error))


def _remove(folder: Path) -> None:
    """Raises only where a later attempt may do better."""
    try:
        shutil.rmtree(folder)
    except OSError as error:
        if is_shortage(error):
            raise
        shutil.rmtree(folder, ignore_errors=True)
