"""Writes the states of work folders, and removes them.

What must hold: what all of them take stays within ``episodes.keep_replay_bytes``, and those of the episode that
was written to longest ago go first; a content is written once for the whole server, and goes with the last episode
that has it; a crash at any place leaves only what the next start removes. Contents are not synced: a machine that
loses power may lose the latest ones, which shows when one is read.

One thread at a time writes and removes.
"""

from __future__ import annotations

import errno
import hashlib
import logging
import shutil
import time
from collections.abc import Callable, Container, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TypeVar

import anyio
import anyio.to_thread

from turnstile.models import ReplayFile
from turnstile_server.data_dir import replay_contents
from turnstile_server.replay.capture import REASONS, Capture, ChangedFile
from turnstile_server.replay.manifest import StateRecord
from turnstile_server.replay.state_files import DIGEST, STATES, ReplayFiles
from turnstile_server.settings import EpisodeSettings

T = TypeVar("T")

_LOG = logging.getLogger(__name__)
_BLOCK = 4096
_PARTIAL = "partial"
_NO_ROOM = "the server's room is used up (episodes.keep_replay_bytes)"
_UNKNOWN = (REASONS["large"], REASONS["files"], REASONS["bytes"])
"""Reasons of a content that changed in a way that is not known."""
_LATE = "not all was looked at in time"
_NO_DISK = "the disk is nearly full"


@dataclass(frozen=True, slots=True)
class KeepRoom:
    """The room and the time that a state may take. ``bytes``: of the episode's room; ``deadline``, by the
    monotonic clock: contents that are not written by then are left out."""

    bytes: int
    deadline: float


@dataclass(frozen=True, slots=True)
class KeptState:
    """A written state, and what it takes of the episode's room."""

    record: StateRecord
    taken: bool
    """False: only that it was missed was written."""
    contents: int
    bytes: int


def _digest(file: ChangedFile) -> str | None:
    return None if file.data is None else hashlib.sha256(file.data).hexdigest()


def _differs(file: ChangedFile, digest: str | None, before: ReplayFile | None) -> bool:
    """A content that was not brought is another one, as far as anyone knows."""
    if before is None or (file.mode, file.size) != (before.mode, before.size):
        return True
    if digest is None:
        return file.left_out != before.left_out or file.left_out in _UNKNOWN
    return digest != before.digest


def _on_disk(size: int) -> int:
    return max(1, -(-size // _BLOCK)) * _BLOCK


class ReplayStore(ReplayFiles):
    """``spare_bytes``: what stays free on the disk, for the journal. ``running``: episodes whose states do not
    make way. Nothing is made before the first state is kept."""

    def __init__(self, folder: Path, settings: EpisodeSettings, spare_bytes: int, running: Container[str]) -> None:
        super().__init__(folder)
        self._contents = replay_contents(folder)
        self._most = settings.keep_replay_bytes
        self._spare_bytes = spare_bytes
        self._running = running
        self._writing = anyio.CapacityLimiter(1)
        self._written: dict[str, float] = {}
        """When each episode was written to last, in Unix time. Changed in the one thread only."""
        self._used = 0

    async def open(self) -> None:
        """Takes up what is there, and removes what a crash left. A folder that cannot be read is logged."""
        try:
            await self._in_thread(self._scan)
        except OSError as error:
            _LOG.error("states of work folders in %s cannot be read: %s", self._folder, error)

    def _scan(self) -> None:
        if not self._folder.exists():
            return
        for path in sorted((self._folder / "episodes").glob("*")):
            states = path / STATES
            if states.exists():
                status = states.stat()
                self._written[path.name] = status.st_mtime
                self._used += _on_disk(status.st_size)
            else:
                shutil.rmtree(path)
        for path in self._contents.glob("*"):
            status = path.stat()
            if status.st_nlink == 1 or DIGEST.fullmatch(path.name) is None:  # of no episode, or not whole
                path.unlink()
            else:
                self._used += _on_disk(status.st_size)

    @property
    def used_bytes(self) -> int:
        """Bytes that all states and contents take on the disk."""
        return self._used

    async def keep(
        self,
        episode_id: str,
        record: StateRecord,
        capture: Capture,
        before: Mapping[str, ReplayFile],
        room: KeepRoom,
        *,
        always: bool,
    ) -> KeptState | None:
        """Writes a state: ``record`` with what ``capture`` has otherwise than ``before``. Where its list alone is
        larger than the room, the state is one that was missed. ``always`` False: a state in which nothing changed
        is not written (None). Raises OSError; then there is no such state."""
        work = partial(self._keep, episode_id, record, capture, before, room, always=always)
        return await self._in_thread(work)

    def _keep(
        self,
        episode_id: str,
        record: StateRecord,
        capture: Capture,
        before: Mapping[str, ReplayFile],
        room: KeepRoom,
        *,
        always: bool,
    ) -> KeptState | None:
        folder = self._of(episode_id)
        digests = {one.path: _digest(one) for one in capture.changed}
        changed = [one for one in capture.changed if _differs(one, digests[one.path], before.get(one.path))]
        gone = tuple(path for path in capture.gone if path in before)
        if not changed and not gone and not always:
            return None
        for made in (self._folder, folder.parent, folder, self._contents):
            made.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._make_room(sum(_on_disk(one.size) for one in changed if one.data is not None) + _BLOCK)
        contents = taken = 0
        files: list[ReplayFile] = []
        for one in changed:
            digest, why = digests[one.path], one.left_out
            if one.data is not None and digest is not None and not (folder / digest).exists():
                why = REASONS["time"] if time.monotonic() > room.deadline else self._put(folder, digest, one.data)
                contents, taken = contents + (why is None), taken + (0 if why else len(one.data))
            kept = digest if why is None else None
            files.append(ReplayFile(path=one.path, mode=one.mode, size=one.size, digest=kept, left_out=why))
        missed = _LATE if capture.late else record.missed
        whole = replace(record, set=tuple(files), gone=gone, further=capture.further, missed=missed)
        fits = taken + len(whole.line()) <= room.bytes
        if not fits:
            whole = replace(record, missed=REASONS["bytes"])
        taken += self._append(folder / STATES, whole.line())
        self._written[episode_id] = time.time()
        return KeptState(whole, fits, contents, taken)

    def _put(self, folder: Path, digest: str, data: bytes) -> str | None:
        """The content in the episode's folder; why it cannot be kept."""
        target, shared = folder / digest, self._contents / digest
        if self._link(shared, target):
            return None
        if self._used + _on_disk(len(data)) > self._most:
            return _NO_ROOM
        if shutil.disk_usage(self._contents).free - len(data) < self._spare_bytes:
            return _NO_DISK
        unfinished = self._contents / _PARTIAL
        unfinished.write_bytes(data)
        unfinished.replace(shared)
        self._used += _on_disk(len(data))
        target.hardlink_to(shared)
        return None

    @staticmethod
    def _link(shared: Path, target: Path) -> bool:
        """False: the content is not there yet, or has as many links as the file system lets it have."""
        try:
            target.hardlink_to(shared)
        except FileNotFoundError:
            return False
        except OSError as error:
            if error.errno != errno.EMLINK:
                raise
            return False
        return True

    def _append(self, path: Path, line: bytes) -> int:
        """Append a line. Returns the number of bytes written: all, or none where it raises OSError."""
        with path.open("ab") as file:
            before = file.tell()
            try:
                file.write(line)
                file.flush()
            except OSError:
                file.truncate(before)
                raise
        self._used += _on_disk(before + len(line)) - (_on_disk(before) if before else 0)
        return len(line)

    def _make_room(self, wanted: int) -> None:
        while self._used + wanted > self._most and (oldest := self._oldest()) is not None:
            self._drop(oldest)

    def _oldest(self) -> str | None:
        ended = [name for name in self._written if name not in self._running]
        return min(ended, key=self._written.__getitem__, default=None)

    async def trim(self, excess: int) -> int:
        """Until ``excess`` bytes of the disk are free again, as far as ended episodes go. Returns how many
        episodes' states went."""

        def trim() -> int:
            wanted, gone = self._used - excess, 0
            while self._used > wanted and (oldest := self._oldest()) is not None:
                self._drop(oldest)
                gone += 1
            return gone

        return await self._in_thread(trim) if excess > 0 else 0

    async def sweep(self, lives: Callable[[str], bool]) -> None:
        """Those of episodes that do not live go."""
        await self.remove_of([name for name in list(self._written) if not lives(name)])

    async def remove_of(self, episode_ids: Iterable[str]) -> None:
        """All of these episodes, and the contents that no other has."""
        for episode_id in [name for name in episode_ids if name in self._written]:
            with anyio.CancelScope(shield=True):
                await self._in_thread(partial(self._drop, episode_id))

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await anyio.to_thread.run_sync(work, limiter=self._writing)

    def _drop(self, episode_id: str) -> None:
        """Remove the states of an episode. What cannot be removed is logged, and removed at the next start."""
        self._written.pop(episode_id, None)
        folder = self._of(episode_id)
        try:
            states = folder / STATES
            self._used -= _on_disk(states.stat().st_size)
            states.unlink()  # without it, what a crash leaves of the others is removed at the next start
            for path in folder.iterdir():
                path.unlink()
                shared = self._contents / path.name
                with suppress(FileNotFoundError):
                    status = shared.stat()
                    if status.st_nlink == 1:
                        shared.unlink()
                        self._used -= _on_disk(status.st_size)
            folder.rmdir()
        except OSError as error:
            _LOG.error("states of episode %s cannot be removed: %s", episode_id, error)
