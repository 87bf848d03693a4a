"""Deletion by the journal's bounds: states of work folders, snapshots and kept work first, then episodes.

What must hold: the kept work of an episode that is deleted goes with it; an episode whose record was changed at
the same time does not come back; an episode whose turns a fork continues stays as long as the fork.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

from turnstile_server.episodes.archive import Archive
from turnstile_server.episodes.snapshot_store import SnapshotStore
from turnstile_server.episodes.work_store import WorkStore
from turnstile_server.errors import Conflict, TurnstileError
from turnstile_server.journal.protocol import Journal
from turnstile_server.replay.store import ReplayStore

_LOG = logging.getLogger(__name__)


class Retention:
    """Deletes episodes, one by request or many by the bounds, together with what is kept of them."""

    def __init__(
        self, journal: Journal, archive: Archive, works: WorkStore, snapshots: SnapshotStore, replays: ReplayStore
    ) -> None:
        self._journal = journal
        self._archive = archive
        self._works = works
        self._snapshots = snapshots
        self._replays = replays

    async def delete(self, episode_id: str) -> None:
        """One ended episode. Raises Conflict where forks continue its turns; JournalUnavailable."""
        async with self._archive.changing:
            if forks := self._archive.forks_of(episode_id):
                raise Conflict(
                    f"{len(forks)} forks continue turns of episode {episode_id}: delete them first "
                    f"({', '.join(forks[:5])}{', …' if len(forks) > 5 else ''})"
                )
            await self._journal.delete(episode_id)
            self._archive.forget(episode_id)
        await self._remove([episode_id])

    async def apply(self) -> None:
        """By the settings' bounds. A journal that refuses is logged."""
        try:
            await self._replays.trim(await self._journal.excess())
            await self._snapshots.trim(time.time(), await self._journal.excess())
            await self._works.trim(time.time(), await self._journal.excess())
            async with self._archive.changing:
                deleted = await self._journal.apply_retention(time.time(), self._archive.forked)
                for episode_id in deleted:
                    self._archive.forget(episode_id)
        except TurnstileError as error:
            _LOG.error("retention could not be applied: %s", error.message)
            return
        await self._remove(deleted)

    async def _remove(self, episode_ids: Sequence[str]) -> None:
        await self._works.remove(episode_ids)
        await self._snapshots.remove_of(episode_ids)
        await self._replays.remove_of(episode_ids)

    async def sweep(self) -> None:
        """At the start: removes kept work that no episode's record names, and what is of no episode."""
        await self._replays.sweep(lambda episode_id: episode_id in self._archive)
        await self._snapshots.sweep(lambda episode_id: episode_id in self._archive)
        await self._works.remove([one for one in self._works.episode_ids if not self._named(one)])

    def _named(self, episode_id: str) -> bool:
        episode = self._archive.get(episode_id)
        return episode is not None and episode.work is not None
