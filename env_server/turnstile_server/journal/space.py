"""Disk space: deletes episodes by request and by retention, and gives their bytes back to the file system.

What must hold: a deletion works on a full disk; only records that were deleted leave the disk; a segment is
removed when nothing in it lives, or rewritten (``compaction``) when enough of it is dead. Runs in the event loop;
what reads, decides and removes runs in the journal's index thread.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol, TypeVar

import anyio

from turnstile_server.errors import JournalUnavailable
from turnstile_server.journal.commit import GroupCommit
from turnstile_server.journal.compaction import compacted
from turnstile_server.journal.entries import SegmentMark
from turnstile_server.journal.file_operations import DirectoryLock, FileOps
from turnstile_server.journal.index import JournalIndex, LastState, SegmentUse, UnindexedEntries
from turnstile_server.journal.protocol import Record, RecordType
from turnstile_server.journal.retention import DiskBounds, Room, expired, make_room
from turnstile_server.journal.segments import FILE_HEADER, SEGMENT_PATTERN, encode, segment_path
from turnstile_server.journal.stats import JournalStats
from turnstile_server.journal.summaries import Summaries
from turnstile_server.settings import JournalSettings

logger = logging.getLogger(__name__)

AT_ONCE = 256
"""Episodes deleted at once: their tombstones fit into the reserve of a full disk."""
WASTE_SHARE = 16
"""A segment is rewritten when its dead bytes are more than its living ones, and 1/16 of a whole segment."""
PRESSED_SHARE = 8
"""When the disk is short, a segment is rewritten when 1/8 of it is dead."""
T = TypeVar("T")


class InThread(Protocol):
    """Runs work in the index thread. Raises JournalUnavailable where the disk or the index fails."""

    async def __call__(self, work: Callable[[], T]) -> T: ...


@dataclass(frozen=True, slots=True)
class IndexAccess:
    """The index, and the thread in which alone it may be used."""

    index: JournalIndex
    summaries: Summaries
    unindexed: UnindexedEntries
    in_thread: InThread

    def take(self) -> None:
        """Brings the index up to date. In the thread only."""
        self.summaries.take(self.index.take(self.unindexed))


class DiskSpace:
    """The space of one journal's directory."""

    def __init__(
        self,
        directory: Path,
        files: FileOps,
        settings: JournalSettings,
        stats: JournalStats,
        access: IndexAccess,
        commit: GroupCommit,
        lock: DirectoryLock,
        beside: Sequence[Path],
    ) -> None:
        self.over: str | None = None
        """The reason that the bounds of the disk allow no new episode; None where they do."""
        self._directory = directory
        self._files = files
        self._settings = settings
        self._stats = stats
        self._access = access
        self._commit = commit
        self._lock = lock
        self._beside = beside
        self._collecting = anyio.Lock()

    async def delete(self, episode_ids: list[str]) -> None:
        """Deletes episodes and frees their space as far as segments allow. Raises JournalUnavailable."""
        await self._bury_all(episode_ids)
        await self._collect(pressed=self._commit.trouble is not None)

    async def apply_retention(self, now: float, spared: Container[str], fresh: Container[str]) -> list[str]:
        """Deletes ended episodes by ``retention_days`` and ``retention_bytes``, then by the bounds of the disk
        (see ``retention``), the oldest first, of ``fresh`` only by their age; returns their ids.

        ``now`` is Unix seconds. Raises JournalUnavailable; then some of them may be deleted.
        """
        days, size = self._settings.retention_days, self._settings.retention_bytes

        def choose() -> list[str]:
            self._access.take()
            return expired(self._states(spared), self._access.index.sizes(), now, days, size, fresh)

        chosen = await self._access.in_thread(choose) if days is not None or size is not None else []
        await self._bury_all(chosen)
        await self._collect()
        return [*chosen, *await self._make_room(spared, fresh)]

    async def excess(self) -> int:
        """Bytes over the bounds of the disk."""
        return await self._access.in_thread(self._excess)

    def _excess(self) -> int:
        return self._bounds().excess(self._disk_bytes(), self._files.free_bytes(self._directory))

    def _states(self, spared: Container[str]) -> list[LastState]:
        return [state for state in self._access.index.states() if state.episode_id not in spared]

    async def _make_room(self, spared: Container[str], fresh: Container[str]) -> list[str]:
        """Brings the journal within the bounds of the disk: first without what is deleted already, then by
        deleting the oldest episodes that may go."""
        bounds = await self._access.in_thread(self._bounds)
        if await self.excess():
            await self._collect(pressed=True)

        def choose() -> Room:
            self._access.take()
            over = self._excess()
            if not over:
                return Room([])
            spare = self._settings.retention_spares_unexported
            states, sizes = self._states(spared), self._access.index.sizes()
            return make_room(states, sizes, over, fresh, spare_unexported=spare)

        room = await self._access.in_thread(choose)
        if room.delete:
            await self._bury_all(room.delete)
            await self._collect(pressed=True)
            logger.info("%d episodes were deleted to make room (journal.retention_*)", len(room.delete))
        used = await self._access.in_thread(self._disk_bytes)
        over = bounds.most is not None and used > bounds.most
        told, self.over = self.over, _over_share(used, bounds, room) if over else None
        if self.over is not None and told is None:
            logger.error("No new episodes: %s", self.over)
        return room.delete

    def _bounds(self) -> DiskBounds:
        return DiskBounds.of(self._settings, self._files.total_bytes(self._directory))

    def _disk_bytes(self) -> int:
        """Bytes on disk of the segments, and of what is kept beside them."""
        found = 0
        beside = (path for folder in self._beside for path in folder.glob("*"))
        for path in (*self._directory.glob(SEGMENT_PATTERN), *beside):
            with contextlib.suppress(FileNotFoundError):
                found += path.stat().st_size
        return found

    async def told_at_start(self) -> str:
        """One line about the directory and its bounds."""

        def line() -> str:
            total = self._files.total_bytes(self._directory)
            bounds = DiskBounds.of(self._settings, total)
            return bounds.sentence(self._directory, self._disk_bytes(), total, self._settings)

        return await self._access.in_thread(line)

    async def _bury_all(self, episode_ids: list[str]) -> None:
        await self._commit.barrier().wait()

        def known() -> list[str]:
            unindexed = self._access.unindexed.snapshot()
            return [name for name in episode_ids if self._access.index.locations(name, unindexed)]

        names = await self._access.in_thread(known)
        if not names:
            return
        for start in range(0, len(names), AT_ONCE):  # in parts, because the reserve of a full disk is small
            chunk = names[start : start + AT_ONCE]
            await self._bury([Record(RecordType.EPISODE_DELETED, name, {}) for name in chunk])
            if start + AT_ONCE < len(names):
                await self._collect()

    async def _bury(self, tombstones: list[Record]) -> None:
        """Stores tombstones. Where even the reserve has no room for them, the segments' summaries give theirs."""
        for attempt in range(2):
            queued = [self._commit.submit(encode(tombstone)) for tombstone in tombstones]
            try:
                for item in queued:
                    await item.wait()
            except JournalUnavailable:
                if attempt or not await self._access.in_thread(self._access.summaries.give_up):
                    raise
            else:
                return

    async def _collect(self, *, pressed: bool = False) -> None:
        """Gives the space of deleted records back to the disk: removes dead segments, the oldest first, each after
        the tombstones that must outlive it are stored again; then rewrites those that hold more dead bytes than
        living ones. ``pressed``: also those with fewer."""
        async with self._collecting:
            await self._remove_dead()
            if await self._access.in_thread(lambda: self._tail_is_waste(pressed)):
                await self._commit.rotate().wait()
                await self._remove_dead()
            kept: set[int] = set()
            while (
                segment := await self._access.in_thread(lambda: self._next_wasteful(pressed, kept))
            ) is not None:
                kept.add(segment)
                await self._access.in_thread(lambda segment=segment: self._compact(segment))  # type: ignore[misc]
                await self._remove_dead()

    async def _remove_dead(self) -> None:
        while (found := await self._access.in_thread(self._next_dead)) is not None:
            segment, tombstones = found
            if tombstones:
                carried = [
                    Record(RecordType.EPISODE_DELETED, name, {"before": before}) for name, before in tombstones
                ]
                await self._bury(carried)
            await self._access.in_thread(lambda segment=segment: self._remove(segment))  # type: ignore[misc]

    def _next_dead(self) -> tuple[int, list[tuple[str, int]]] | None:
        self._access.take()
        for use in self._access.index.uses()[:-1]:
            if not use.living and not use.damaged_bytes:
                return use.segment, self._access.index.tombstones_needed(use.segment)
        return None

    def _remove(self, segment: int) -> None:
        self._lock.check()
        with contextlib.suppress(FileNotFoundError):  # an earlier attempt failed after this step
            self._files.remove(segment_path(self._directory, segment))
        self._access.summaries.remove(segment)
        self._files.sync_directory(self._directory)
        self._access.index.forget_segment(segment)
        self._stats.segments_removed += 1

    def _tail_is_waste(self, pressed: bool) -> bool:
        self._access.take()
        uses = self._access.index.uses()
        return bool(uses) and self._is_wasteful(uses[-1], pressed)

    def _next_wasteful(self, pressed: bool, kept: set[int]) -> int | None:
        """The closed segment that is rewritten next: the one with the least to copy."""
        self._access.take()
        found = [
            use
            for use in self._access.index.uses()[:-1]
            if use.segment not in kept
            and self._is_wasteful(use, pressed)
            and self._access.index.may_move(use.segment)
        ]
        return min(found, key=lambda use: use.kept_bytes).segment if found else None

    def _is_wasteful(self, use: SegmentUse, pressed: bool) -> bool:
        """True if enough of a segment is dead to copy the rest. A damaged one is kept as it is."""
        if use.damaged_bytes:
            return False
        try:
            size = segment_path(self._directory, use.segment).stat().st_size
        except FileNotFoundError:
            return False
        dead = size - FILE_HEADER.size - use.kept_bytes
        if pressed:
            return dead * PRESSED_SHARE >= size
        return dead >= use.kept_bytes and dead * WASTE_SHARE >= self._settings.segment_bytes

    def _compact(self, segment: int) -> None:
        self._lock.check()
        kept = self._access.index.kept_in(segment)
        try:
            entries = compacted(self._directory, segment, kept, self._files)
        except OSError as error:  # no room for the copy, mostly: what is deleted later may make it
            logger.warning("Segment %d could not be rewritten without its deleted episodes: %s", segment, error)
            return
        if entries is None:
            self._stats.corrupt_records += 1
            self._access.index.apply([replace(self._access.index.marks()[segment], damaged_bytes=1)])
            return
        self._access.index.replace(segment, entries)
        self._files.sync_directory(self._directory)
        mark = entries[-1]
        assert isinstance(mark, SegmentMark)
        self._access.summaries.describe(entries, mark)
        self._stats.segments_compacted += 1


def _over_share(used: int, bounds: DiskBounds, room: Room) -> str:
    return (
        f"the journal takes {used >> 20} MiB, more than its share of the disk of {(bounds.most or 0) >> 20} MiB "
        f"(journal.retention_share), and nothing that may be deleted is left: {room.waiting} ended episodes were "
        f"not fetched yet, {room.fresh} ended or were fetched a moment ago and go later. Fetch or delete some, "
        "or set journal.retention_spares_unexported to false"
    )
