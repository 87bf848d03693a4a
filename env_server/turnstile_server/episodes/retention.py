"""What is deleted by itself: kept work first, then episodes, as the journal's bounds say.

What must hold: the kept work of an episode that is deleted goes with it; an episode whose record was changed at
the same time does not come back.
"""

from __future__ import annotations

import logging
import time

from turnstile_server.episodes.archive import Archive
from turnstile_server.episodes.work_store import WorkStore
from turnstile_server.errors import TurnstileError
from turnstile_server.journal.protocol import Journal

_LOG = logging.getLogger(__name__)


class Retention:
    """Deletes episodes, one by request or many by the bounds, together with what is kept of them."""

    def __init__(self, journal: Journal, archive: Archive, works: WorkStore) -> None:
        self._journal = journal
        self._archive = archive
        self._works = works

    async def delete(self, episode_id: str) -> None:
        """One ended episode. Raises JournalUnavailable."""
        async with self._archive.changing:
            await self._journal.delete(episode_id)
            self._archive.forget(episode_id)
        await self._works.remove([episode_id])

    async def apply(self) -> None:
        """By the settings' bounds. A journal that refuses is logged."""
        try:
            await self._works.trim(time.time(), await self._journal.excess())
            async with self._archive.changing:
                deleted = await self._journal.apply_retention(time.time())
                for episode_id in deleted:
                    self._archive.forget(episode_id)
        except TurnstileError as error:
            _LOG.error("retention could not be applied: %s", error.message)
            return
        await self._works.remove(deleted)

    async def sweep(self) -> None:
        """At the start: removes kept work that no episode's record names."""
        await self._works.remove([one for one in self._works.episode_ids if not self._named(one)])

    def _named(self, episode_id: str) -> bool:
        episode = self._archive.get(episode_id)
        return episode is not None and episode.work is not None
