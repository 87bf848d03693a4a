"""Shows the recorded states of an episode's work folder: what each changed, all files of one, a file's content."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Literal

import anyio
import anyio.to_thread

from turnstile.models import (
    ReplayChange,
    ReplayFile,
    ReplayListing,
    ReplayReport,
    ReplayState,
    SnapshotInfo,
)
from turnstile_server.episodes.reader import EpisodeReader
from turnstile_server.errors import Conflict, NotFound, WorkNotKept
from turnstile_server.replay.manifest import StateRecord
from turnstile_server.replay.state_files import ReplayFiles


class ReplayReports:
    """Implements the control API's ReplayService. ``snapshots_of``: an episode's snapshots, oldest first.
    ``threads`` bounds the threads that make reports."""

    def __init__(
        self,
        episodes: EpisodeReader,
        files: ReplayFiles,
        snapshots_of: Callable[[str], Sequence[SnapshotInfo]],
        threads: anyio.CapacityLimiter,
    ) -> None:
        self._episodes = episodes
        self._files = files
        self._snapshots_of = snapshots_of
        self._threads = threads

    async def report(self, episode_id: str) -> ReplayReport:
        records = await self._recorded(episode_id)
        _, forest = await self._episodes.exported(episode_id)
        seqs = {node.turn_id: node.seq for node in forest.tree.snapshot()}
        snapshots = {one.turn_id: one.snapshot_id for one in self._snapshots_of(episode_id)}

        def make() -> ReplayReport:
            states = tuple(_states(records, seqs, snapshots))
            return ReplayReport(episode_id=episode_id, states=states)

        return await anyio.to_thread.run_sync(make, limiter=self._threads)

    async def listing(self, episode_id: str, state: int) -> ReplayListing:
        records = await self._recorded(episode_id)
        if state >= len(records):
            raise NotFound(f"episode {episode_id} has {len(records)} states, the first is 0: there is no {state}")

        def make() -> ReplayListing:
            known: dict[str, ReplayFile] = {}
            for record in records[: state + 1]:
                _apply(record, known)
            files = tuple(known[path] for path in sorted(known))
            further = records[state].further
            return ReplayListing(episode_id=episode_id, state=state, files=files, further=further)

        return await anyio.to_thread.run_sync(make, limiter=self._threads)

    async def content(self, episode_id: str, digest: str) -> bytes:
        await self._recorded(episode_id)
        return await self._files.content(episode_id, digest)

    async def _recorded(self, episode_id: str) -> list[StateRecord]:
        """Raises NotFound, Conflict, WorkNotKept."""
        episode = await self._episodes.get(episode_id)
        if not episode.replay:
            raise Conflict(
                f"the work folder of episode {episode_id} was not recorded: it has none, or was created without "
                "`replay: true` (episodes.replay)"
            )
        records = await self._files.states(episode_id)
        if records is None and episode.status.ended:
            raise WorkNotKept(
                f"no state of the work folder of episode {episode_id} is kept: it ended before there was one, or "
                "they made way for others (episodes.keep_replay_bytes, journal.retention_*)"
            )
        return records or []


def _apply(record: StateRecord, known: dict[str, ReplayFile]) -> list[ReplayChange]:
    """Brings ``known`` to the state; what changed, by path."""
    changes: list[ReplayChange] = []
    for path in record.gone:
        lost = known.pop(path, None)
        if lost is not None:
            changes.append(ReplayChange(path=path, change="removed", before=lost, after=None))
    for file in record.set:
        before = known.get(file.path)
        known[file.path] = file
        change: Literal["added", "changed"] = "added" if before is None else "changed"
        changes.append(ReplayChange(path=file.path, change=change, before=before, after=file))
    return sorted(changes, key=lambda one: one.path)


def _states(
    records: Sequence[StateRecord], seqs: dict[str, int], snapshots: dict[str | None, str]
) -> Iterator[ReplayState]:
    known: dict[str, ReplayFile] = {}
    for number, record in enumerate(records):
        changes = _apply(record, known)
        turn_id = record.turn_id
        yield ReplayState(
            state=number,
            moment=record.moment,
            turn_id=turn_id,
            seq=None if turn_id is None else seqs.get(turn_id),
            at_s=record.at_s,
            files=len(known),
            changes=tuple(changes) if number else (),
            further=record.further,
            missed=record.missed,
            snapshot_id=None if turn_id is None else snapshots.get(turn_id),
        )
