"""Stores rewards from the trainer, of running and of ended episodes, one at a time.

What must hold: a reward is durable before it is answered or seen; one for an episode that is deleted meanwhile
does not bring it back.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from functools import partial

import anyio

from turnstile.models import Episode, RewardUpdate
from turnstile_server.episodes.amendments import Amendments
from turnstile_server.episodes.archive import Archive
from turnstile_server.episodes.late_rewards import rewarded
from turnstile_server.episodes.run import EpisodeRun


class EpisodeRewards:
    """``running``: the register of running episodes. ``threads``: in which trees are read."""

    def __init__(
        self,
        archive: Archive,
        amendments: Amendments,
        running: Mapping[str, EpisodeRun],
        threads: anyio.CapacityLimiter,
        max_changes: int,
    ) -> None:
        self._archive = archive
        self._amendments = amendments
        self._running = running
        self._threads = threads
        self._max_changes = max_changes

    async def give(self, episode_id: str, update: RewardUpdate) -> Episode:
        """Raises as ``late_rewards.rewarded`` does, NotFound, Conflict, and JournalUnavailable."""
        make = partial(rewarded, update=update, now=time.time(), max_changes=self._max_changes)
        run = self._running.get(episode_id)
        if run is not None:
            with anyio.CancelScope(shield=True):  # what is in the journal is seen
                running = await run.store_rewarded(lambda episode, turns: make(episode, turn_ids=turns))
            if running is not None:
                return running
        turn_ids: Sequence[str] = ()
        if update.turn_rewards:
            forest = await self._archive.forest(episode_id, self._threads)
            turn_ids = forest.own_turn_ids
        return await self._amendments.amend(episode_id, lambda episode: make(episode, turn_ids=turn_ids))
