"""The states of work folders on the disk, for reading.

``episodes/ID/states`` has a line for each state (``manifest.py``), and beside it lies each content of the episode
under its SHA-256: a hard link to the same file in ``contents``, which has every content of the server once. So the
file system counts who uses a content, and reading an episode needs its own folder alone.
"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

import anyio.to_thread

from turnstile_server.errors import NotFound, WorkNotKept
from turnstile_server.replay.manifest import StateRecord, read_states

STATES = "states"
DIGEST = re.compile(r"[0-9a-f]{64}")


class ReplayFiles:
    """Reads what is in ``folder``; it need not be there. ``further``: folders of other workers of one server."""

    def __init__(self, folder: Path, *further: Path) -> None:
        self._folder = folder
        self._further = further

    def _of(self, episode_id: str) -> Path:
        found = (folder / "episodes" / episode_id for folder in self._further)
        return next((path for path in found if path.exists()), self._folder / "episodes" / episode_id)

    async def states(self, episode_id: str) -> list[StateRecord] | None:
        """In order; None: none are kept. Raises WorkNotKept where they cannot be read."""

        def read() -> list[StateRecord] | None:
            try:
                return read_states((self._of(episode_id) / STATES).read_bytes())
            except (FileNotFoundError, NotADirectoryError):
                return None

        try:
            return await anyio.to_thread.run_sync(read)
        except OSError as error:
            raise WorkNotKept(f"the states of episode {episode_id} cannot be read: {error.strerror}") from error

    async def content(self, episode_id: str, digest: str) -> bytes:
        """Raises NotFound for one that the episode does not have, WorkNotKept for one that the disk has
        damaged."""

        def read() -> bytes:
            return (self._of(episode_id) / digest).read_bytes()

        if DIGEST.fullmatch(digest) is None:
            raise NotFound(f"{digest[:80]!r} is no SHA-256 in 64 hex digits")
        try:
            data = await anyio.to_thread.run_sync(read)
        except (FileNotFoundError, NotADirectoryError) as error:
            raise NotFound(
                f"no state of episode {episode_id} has a content {digest}, or it is not kept"
            ) from error
        except OSError as error:
            raise WorkNotKept(f"the content {digest} cannot be read: {error.strerror}") from error
        if hashlib.sha256(data).hexdigest() != digest:
            raise WorkNotKept(f"the content {digest} is damaged on the disk")
        return data
