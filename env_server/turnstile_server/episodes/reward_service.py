"""Stores rewards from the trainer, of running and of ended episodes, one at a time.

What must hold: a reward is durable before it is answered or seen; one for an episode that is deleted meanwhile
does not bring it back.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

import anyio

from turnstile.models import Episode, RewardUpdate
from turnstile_server.episodes.archive import Archive
from turnstile_server.episodes.broadcast import Broadcast
from turnstile_server.episodes.late_rewards import rewarded
from turnstile_server.episodes.run import EpisodeRun
from turnstile_server.errors import NotFound
from turnstile_server.journal.protocol import Journal


class EpisodeRewards:
    """``running``: the register of running episodes. ``threads``: in which trees are read."""

    def __init__(
        self,
        journal: Journal,
        archive: Archive,
        running: Mapping[str, EpisodeRun],
        broadcast: Broadcast,
        threads: anyio.CapacityLimiter,
        max_changes: int,
    ) -> None:
        self.lock = anyio.Lock()
        """Held while a reward is stored; whoever deletes episodes holds it, too."""
        self._journal = journal
        self._archive = archive
        self._running = running
        self._broadcast = broadcast
        self._threads = threads
        self._max_changes = max_changes

    async def give(self, episode_id: str, update: RewardUpdate) -> Episode:
        """Raises as ``late_rewards.rewarded`` does, NotFound, and JournalUnavailable."""
        async with self.lock:
            run = self._running.get(episode_id)
            if run is not None:
                make = partial(rewarded, update=update, now=time.time(), max_changes=self._max_changes)
                with anyio.CancelScope(shield=True):  # what is in the journal is seen
                    running = await run.store_rewarded(lambda episode, turns: make(episode, turn_ids=turns))
                if running is not None:
                    return running
            return await self._give_to_ended(episode_id, update)

    async def _give_to_ended(self, episode_id: str, update: RewardUpdate) -> Episode:
        episode = self._archive.get(episode_id)
        if episode is None:
            raise NotFound(f"there is no episode {episode_id}")
        turn_ids: Sequence[str] = ()
        if update.turn_rewards:
            forest = await self._archive.forest(episode_id, self._threads)
            turn_ids = [node.turn.turn_id for node in forest.tree]
        found = rewarded(episode, update, turn_ids, now=time.time(), max_changes=self._max_changes)
        if found is not episode:
            stored = await self._archive.stored(episode_id)
            with anyio.CancelScope(shield=True):  # what is in the journal is seen
                await self._journal.append(replace(stored, episode=found).record())
                self._archive.add_ended(found)
                self._broadcast.publish(found)
        return found
