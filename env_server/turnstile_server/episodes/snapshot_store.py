"""Snapshots of sandboxes: a file for each below the data directory.

What must hold: a file is whole or not there; snapshots stay within ``episodes.keep_snapshot_bytes`` and
``keep_snapshot_s``, the oldest go first; they go with their episode, at the latest at the next start.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Container, Mapping
from pathlib import Path

import anyio.to_thread

from turnstile.models import SnapshotInfo
from turnstile_server.episodes.bounds import EpisodeBounds
from turnstile_server.episodes.kept_files import PARTIAL, KeptFile, free_bytes, surplus, write_durably
from turnstile_server.episodes.snapshot_file import decode, encode, read_info
from turnstile_server.errors import Conflict, SandboxUnavailable, WorkNotKept
from turnstile_server.settings import EpisodeSettings

_LOG = logging.getLogger(__name__)

SUFFIX = ".snapshot"


class SnapshotStore:
    """``spare_bytes``: what stays free on the disk, for the journal."""

    def __init__(self, folder: Path, settings: EpisodeSettings, spare_bytes: int) -> None:
        self._folder = folder
        self._settings = settings
        self._spare_bytes = spare_bytes
        self._known: dict[str, SnapshotInfo] = {}

    async def open(self) -> None:
        """Takes up what is there. A folder that cannot be read is logged."""
        try:
            self._known = await anyio.to_thread.run_sync(self._scan)
        except OSError as error:
            _LOG.error("snapshots in %s cannot be read: %s", self._folder, error)

    def _scan(self) -> dict[str, SnapshotInfo]:
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found: dict[str, SnapshotInfo] = {}
        for path in self._folder.iterdir():
            try:
                if path.suffix == PARTIAL:
                    path.unlink(missing_ok=True)
                elif path.suffix == SUFFIX:
                    info = read_info(path)
                    found[info.snapshot_id] = info
            except ValueError as error:
                _LOG.error("the snapshot %s is damaged, and is removed: %s", path, error)
                self._unlink([path.stem])
            except OSError as error:
                _LOG.error("the snapshot %s cannot be read: %s", path, error)
        return found

    def of(self, episode_id: str) -> tuple[SnapshotInfo, ...]:
        """The snapshots of one episode, oldest first."""
        found = [info for info in self._known.values() if info.episode_id == episode_id]
        return tuple(sorted(found, key=lambda info: info.at))

    async def make_room(self, episode_id: str, turn_id: str | None) -> None:
        """For one more of the episode, of this turn: the oldest that was not asked for makes way, at first one
        whose turn has a later one. Raises Conflict where the episode has as many as it may have, and all were
        asked for."""
        most = self._settings.max_snapshots
        known = self.of(episode_id)
        surplus_count = len(known) + 1 - most
        latest = {one.turn_id: one for one in known}
        removable = [one for one in known if one.taken == "every_turn"]
        removable.sort(key=lambda one: one.turn_id != turn_id and latest[one.turn_id] is one)
        if surplus_count > len(removable):
            raise Conflict(f"episode {episode_id} has {most} snapshots, its limit (episodes.max_snapshots)")
        await self._remove([one.snapshot_id for one in removable[: max(0, surplus_count)]])

    async def keep(self, info: SnapshotInfo, tars: Mapping[str, bytes]) -> SnapshotInfo:
        """Stores it durably. Raises SandboxUnavailable where the disk or the settings have no room."""

        def write() -> KeptFile:
            data = encode(info, tars)
            if len(data) > self._settings.keep_snapshot_bytes:
                raise SandboxUnavailable(
                    f"the snapshot has {len(data)} bytes, more than episodes.keep_snapshot_bytes"
                )
            if free_bytes(self._folder) - len(data) < self._spare_bytes:
                raise SandboxUnavailable("the snapshot cannot be stored: the disk is nearly full")
            return write_durably(self._path(info.snapshot_id), data)

        try:
            file = await anyio.to_thread.run_sync(write)
        except OSError as error:
            raise SandboxUnavailable(f"the snapshot cannot be stored: {error.strerror}") from error
        kept = info.model_copy(update={"bytes": file.bytes})
        self._known[info.snapshot_id] = kept
        await self.trim(time.time())
        return kept

    async def load(self, snapshot_id: str) -> dict[str, bytes]:
        """The tars by folder. Raises WorkNotKept."""

        def read() -> dict[str, bytes]:
            return decode(self._path(snapshot_id).read_bytes())

        try:
            return await anyio.to_thread.run_sync(read)
        except FileNotFoundError as error:
            raise WorkNotKept(
                f"the snapshot {snapshot_id} is not kept any more (episodes.keep_snapshot_bytes, keep_snapshot_s)"
            ) from error
        except (OSError, ValueError) as error:
            raise WorkNotKept(f"the snapshot {snapshot_id} cannot be read: {error}") from error

    async def trim(self, now: float, excess: int = 0) -> int:
        """By the settings' bounds, and until ``excess`` bytes of the disk are free again, for which none of the
        last ``fetch_grace_s`` goes. Returns how many went."""
        files = {name: KeptFile(info.bytes, info.at) for name, info in self._known.items()}
        limit, age_s = self._settings.keep_snapshot_bytes, self._settings.keep_snapshot_s
        gone = surplus(files, now, limit, age_s, excess, self._settings.bounds_of(EpisodeBounds).fetch_grace_s)
        await self._remove(gone)
        return len(gone)

    async def remove_of(self, episode_ids: Container[str]) -> None:
        """All of these episodes."""
        await self._remove([name for name, info in self._known.items() if info.episode_id in episode_ids])

    async def sweep(self, lives: Callable[[str], bool]) -> None:
        """Those of episodes that do not live go."""
        await self._remove([name for name, info in self._known.items() if not lives(info.episode_id)])

    async def _remove(self, names: list[str]) -> None:
        for name in names:
            self._known.pop(name, None)
        if names:
            with anyio.CancelScope(shield=True):  # nobody else would ever remove what is not known any more
                await anyio.to_thread.run_sync(self._unlink, names)

    def _unlink(self, names: list[str]) -> None:
        for name in names:
            try:
                self._path(name).unlink(missing_ok=True)
            except OSError as error:
                _LOG.error("the snapshot %s cannot be removed: %s", name, error)

    def _path(self, snapshot_id: str) -> Path:
        return self._folder / f"{snapshot_id}{SUFFIX}"
