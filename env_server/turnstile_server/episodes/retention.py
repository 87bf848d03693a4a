"""Deletion by the journal's bounds: states of work folders, snapshots and kept work first, then episodes.

What must hold: the kept work of an episode that is deleted goes with it; an episode whose record was changed at
the same time does not come back; an episode whose turns a fork continues stays as long as the fork; no bound of
size deletes an episode that ended or was fetched within ``fetch_grace_s``, which is counted since this start.
"""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass

from turnstile_server.episodes.archive import Archive
from turnstile_server.episodes.bounds import EpisodeBounds
from turnstile_server.episodes.snapshot_store import SnapshotStore
from turnstile_server.episodes.work_store import WorkStore
from turnstile_server.errors import Conflict, TurnstileError
from turnstile_server.journal.protocol import Journal
from turnstile_server.replay.store import ReplayStore

_LOG = logging.getLogger(__name__)
_NAMES = {
    "episodes": "episodes",
    "replays": "recordings of work folders",
    "snapshots": "snapshots",
    "works": "kept works",
}


@dataclass(frozen=True, slots=True)
class KeptBeside:
    """The files that are kept of episodes beside the journal."""

    works: WorkStore
    snapshots: SnapshotStore
    replays: ReplayStore

    async def trim(self, excess: Callable[[], Awaitable[int]]) -> Counter[str]:
        """By their own bounds, and by those of the disk, as long as ``excess`` says bytes that are too many.
        Returns what went for those."""
        gone: Counter[str] = Counter()
        gone["replays"] = await self.replays.trim(await excess())
        for name, store in (("snapshots", self.snapshots), ("works", self.works)):
            over = await excess()
            removed = await store.trim(time.time(), over)
            gone[name] = removed if over else 0
        return +gone

    async def remove(self, episode_ids: Sequence[str]) -> None:
        """All that is kept of these episodes."""
        await self.works.remove(episode_ids)
        await self.snapshots.remove_of(episode_ids)
        await self.replays.remove_of(episode_ids)


class Retention:
    """Deletes episodes, one by request or many by the bounds, together with what is kept of them. ``notify`` is
    told of the latter, at most every ``notice_interval_s``: a sentence, and what went since."""

    def __init__(
        self,
        journal: Journal,
        archive: Archive,
        kept: KeptBeside,
        bounds: EpisodeBounds,
        notify: Callable[[str, Mapping[str, int]], None],
    ) -> None:
        self._journal = journal
        self._archive = archive
        self._kept = kept
        self._bounds = bounds
        self._notify = notify
        self._untold: Counter[str] = Counter()
        self._told_at = -math.inf
        self._told_refusal: str | None = None

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
        await self._kept.remove([episode_id])

    async def apply(self) -> None:
        """By the settings' bounds. A journal that refuses is logged."""
        now = time.monotonic()
        try:
            gone = await self._kept.trim(self._journal.excess)
            async with self._archive.changing:
                fresh = self._archive.touched_since(now - self._bounds.fetch_grace_s)
                deleted = await self._journal.apply_retention(time.time(), self._archive.forked, fresh)
                for episode_id in deleted:
                    self._archive.forget(episode_id)
        except TurnstileError as error:
            _LOG.error("retention could not be applied: %s", error.message)
            return
        await self._kept.remove(deleted)
        self._untold += gone + Counter(episodes=len(deleted))
        self._tell(now)

    def _tell(self, now: float) -> None:
        """Of what went, and once of a journal that takes no new episodes although all that may go has gone."""
        refusal = self._journal.refusal
        refuses, self._told_refusal = refusal is not None and self._told_refusal is None, refusal
        due = bool(self._untold) and now - self._told_at >= self._bounds.notice_interval_s
        if not refuses and not due:
            return
        went = ", ".join(f"{count} {_NAMES[name]}" for name, count in sorted(self._untold.items()))
        said = [f"deleted by the bounds of the disk or of age (journal.retention_*): {went}"] if went else []
        said += [f"new episodes are refused: {refusal}"] if refuses else []
        self._notify("; ".join(said), self._untold)
        self._untold, self._told_at = Counter(), now

    async def sweep(self) -> None:
        """At the start: removes kept work that no episode's record names, and what is of no episode."""
        await self._kept.replays.sweep(lambda episode_id: episode_id in self._archive)
        await self._kept.snapshots.sweep(lambda episode_id: episode_id in self._archive)
        await self._kept.works.remove([one for one in self._kept.works.episode_ids if not self._named(one)])

    def _named(self, episode_id: str) -> bool:
        episode = self._archive.get(episode_id)
        return episode is not None and episode.work is not None
