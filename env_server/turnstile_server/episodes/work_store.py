"""The work of ended episodes, kept to be judged again: a file for each below the data directory.

What must hold: a file is whole or not there, and durable before the end that names it; kept work never keeps an
episode from ending (where it cannot be kept, the log says so); it stays within ``episodes.keep_work_bytes`` and
``keep_work_s``, and goes before episodes do where the disk is short; a file whose episode is gone is removed, at
the latest at the next start.
"""

from __future__ import annotations

import hashlib
import logging
import re
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import anyio.to_thread

from turnstile.models import CLIENT_ID_PATTERN, KeptWork
from turnstile_server.episodes.bounds import EpisodeBounds
from turnstile_server.episodes.kept_files import PARTIAL, KeptFile, free_bytes, surplus, write_durably
from turnstile_server.episodes.work_file import EndedWork, decode, encode
from turnstile_server.errors import WorkNotKept
from turnstile_server.settings import EpisodeSettings

_LOG = logging.getLogger(__name__)

SUFFIX = ".work"


class KeptWorks:
    """The kept work in a folder, for reading only. ``further``: folders of other workers of one server."""

    def __init__(self, folder: Path, *further: Path) -> None:
        self._folder = folder
        self._further = further
        self._files: dict[str, KeptFile] = {}

    async def open(self) -> None:
        """Takes up what is there. A folder that cannot be read is logged: nothing is kept then."""
        try:
            self._files = await anyio.to_thread.run_sync(self._scan)
        except OSError as error:
            _LOG.error("kept work in %s cannot be read: %s", self._folder, error)

    def _scan(self) -> dict[str, KeptFile]:
        found = {}
        for folder in (self._folder, *self._further):
            for path in folder.iterdir() if folder.exists() else ():
                if path.suffix == SUFFIX and re.fullmatch(CLIENT_ID_PATTERN, path.stem):
                    status = path.stat()
                    found[path.stem] = KeptFile(status.st_size, status.st_mtime)
        return found

    def __contains__(self, episode_id: str) -> bool:
        return episode_id in self._files

    async def recovered(self, episode_id: str) -> KeptWork | None:
        """The kept work of an episode whose end no record has, because the server died while it was graded."""
        if episode_id not in self._files:
            return None

        def read() -> KeptWork:
            data = self._path(episode_id).read_bytes()
            return _kept(decode(data), data)

        try:
            return await anyio.to_thread.run_sync(read)
        except (OSError, ValueError) as error:
            _LOG.error("the kept work of episode %s cannot be read: %s", episode_id, error)
            return None

    def _path(self, episode_id: str) -> Path:
        name = f"{episode_id}{SUFFIX}"
        return next((folder / name for folder in self._further if (folder / name).exists()), self._folder / name)


class WorkStore(KeptWorks):
    """``spare_bytes``: what stays free on the disk, for the journal. ``changed`` is told the bytes in use."""

    def __init__(
        self, folder: Path, settings: EpisodeSettings, spare_bytes: int, changed: Callable[[int], None]
    ) -> None:
        super().__init__(folder)
        self._settings = settings
        self._spare_bytes = spare_bytes
        self._changed = changed

    async def open(self) -> None:
        """As the reader's. What an earlier server left unfinished goes."""
        await super().open()
        self._count()

    def _scan(self) -> dict[str, KeptFile]:
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for path in self._folder.iterdir():
            if path.suffix == PARTIAL:
                path.unlink(missing_ok=True)
        return super()._scan()

    @property
    def episode_ids(self) -> tuple[str, ...]:
        """Ids of the episodes with kept work."""
        return tuple(self._files)

    def keeps(self, *, graded: bool) -> bool:
        """True if the settings keep work at the end of an episode. ``graded``: it has a reward."""
        return self._settings.keep_work == "all" or (self._settings.keep_work == "ungraded" and not graded)

    async def keep(self, ended: EndedWork) -> KeptWork | None:
        """Keeps it durably; None where the settings or the disk do not let it. Never raises for the disk."""
        if not self.keeps(graded=False):
            return None
        try:
            kept = await anyio.to_thread.run_sync(self._write, ended)
        except OSError as error:
            _LOG.error("the work of episode %s is not kept: %s", ended.episode_id, error)
            return None
        if kept is not None:
            self._files[ended.episode_id] = KeptFile(kept.bytes, time.time())
            await self.trim(time.time())  # counts it, too
        return kept

    def _write(self, ended: EndedWork) -> KeptWork | None:
        data = encode(ended)
        if len(data) > self._settings.keep_work_bytes:
            _LOG.warning(
                "the work of episode %s is not kept: %d bytes, more than episodes.keep_work_bytes",
                ended.episode_id,
                len(data),
            )
            return None
        if free_bytes(self._folder) - len(data) < self._spare_bytes:
            _LOG.warning("the work of episode %s is not kept: the disk is nearly full", ended.episode_id)
            return None
        write_durably(self._path(ended.episode_id), data)
        return _kept(ended, data)

    async def load(self, episode_id: str, digest: str) -> EndedWork:
        """The work that a record names by its ``digest``. Raises WorkNotKept."""
        try:
            data = await anyio.to_thread.run_sync(self._path(episode_id).read_bytes)
        except FileNotFoundError as error:
            raise WorkNotKept(
                f"the work of episode {episode_id} is not kept any more (episodes.keep_work_bytes, keep_work_s)"
            ) from error
        except OSError as error:
            raise WorkNotKept(f"the kept work of episode {episode_id} cannot be read: {error.strerror}") from error
        return await anyio.to_thread.run_sync(_checked, episode_id, data, digest)

    async def remove(self, episode_ids: Iterable[str]) -> None:
        """Removes what there is of them. A file that cannot be removed is logged, and tried again at the next
        start."""
        gone = [episode_id for episode_id in episode_ids if episode_id in self._files]
        for episode_id in gone:
            del self._files[episode_id]
        self._count()
        if gone:
            await anyio.to_thread.run_sync(self._unlink, gone)

    def _unlink(self, episode_ids: list[str]) -> None:
        for episode_id in episode_ids:
            try:
                self._path(episode_id).unlink(missing_ok=True)
            except OSError as error:
                _LOG.error("the kept work of episode %s cannot be removed: %s", episode_id, error)

    async def trim(self, now: float, excess: int = 0) -> int:
        """Removes what is too old at Unix time ``now``, and then the oldest: above ``keep_work_bytes``, and until
        ``excess`` bytes of the disk are free again, for which none of the last ``fetch_grace_s`` goes. Returns how
        many."""
        limit, age_s = self._settings.keep_work_bytes, self._settings.keep_work_s
        gone = surplus(
            self._files, now, limit, age_s, excess, self._settings.bounds_of(EpisodeBounds).fetch_grace_s
        )
        await self.remove(gone)
        return len(gone)

    def _count(self) -> None:
        self._changed(sum(file.bytes for file in self._files.values()))


def _kept(ended: EndedWork, data: bytes) -> KeptWork:
    return KeptWork(
        digest=hashlib.sha256(data).hexdigest(), bytes=len(data), status=ended.status, error=ended.error
    )


def _checked(episode_id: str, data: bytes, digest: str) -> EndedWork:
    if hashlib.sha256(data).hexdigest() != digest:
        raise WorkNotKept(f"the kept work of episode {episode_id} is not what its record says: the file changed")
    try:
        return decode(data)
    except ValueError as error:
        raise WorkNotKept(f"the kept work of episode {episode_id} cannot be read: {error}") from error
