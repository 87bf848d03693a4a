"""Which episode a turn belongs to. Turns have no index: their ids say when they were sampled."""

from __future__ import annotations

import re
from collections.abc import Mapping

from turnstile_server.episodes.archive import Archive
from turnstile_server.episodes.run import EpisodeRun
from turnstile_server.episodes.store import Forest
from turnstile_server.errors import NotFound
from turnstile_server.journal.protocol import JournalReading, RecordType

_TURN_ID = re.compile(r"turn_([0-9a-f]{12})[0-9a-f]{20}")
"""A UUIDv7, whose first 48 bits are Unix time in milliseconds."""
CLOCK_SLACK_S = 2.0
"""Seconds by which the clock may have been set while an episode ran. Its turns are still found."""


class TurnFinder:
    """``searched``: episodes that are read from the journal for one turn, at most."""

    def __init__(
        self, running: Mapping[str, EpisodeRun], archive: Archive, journal: JournalReading, searched: int
    ) -> None:
        self._running = running
        self._archive = archive
        self._journal = journal
        self._searched = searched

    async def episode_of(self, turn_id: str) -> str:
        """The id of the episode in which the turn was sampled. Raises NotFound."""
        for episode_id, run in self._running.items():
            if _sampled(run.forest, turn_id):
                return episode_id
        made = _TURN_ID.fullmatch(turn_id)
        if made is None:
            raise NotFound(f"there is no turn {turn_id[:100]}")
        unread: list[str] = []
        for episode_id in self._archive.alive_at(int(made[1], 16) / 1000, CLOCK_SLACK_S):
            forest = self._archive.cached(episode_id)
            if forest is None:
                unread.append(episode_id)
            elif _sampled(forest, turn_id):
                return episode_id
        for episode_id in unread[: self._searched]:
            if await self._has(episode_id, turn_id):
                return episode_id
        if len(unread) > self._searched:
            raise NotFound(
                f"turn {turn_id} is in none of {self._searched} episodes that were read for it (episodes."
                f"searched_episodes), of {len(unread)} that ran at its time: name its episode (?episode_id=)"
            )
        raise NotFound(f"there is no turn {turn_id}")

    async def _has(self, episode_id: str, turn_id: str) -> bool:
        records = await self._journal.read(episode_id)
        return any(one.type is RecordType.TURN and one.meta.get("turn_id") == turn_id for one in records)


def _sampled(forest: Forest, turn_id: str) -> bool:
    """The turn is the episode's own, and not one that a fork began with."""
    return turn_id in forest.tree and not forest.tree[turn_id].inherited
