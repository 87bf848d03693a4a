"""Ended episodes: their records in memory, compact; their trees from the journal when somebody asks.

Also the order in which all episodes were created, which pages and cursors go by, and the idempotency keys.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping

import orjson

from turnstile.models import Episode, EpisodePage, EpisodeStatus
from turnstile_server.episodes.run import EpisodeRun
from turnstile_server.episodes.store import Forest, Stored, rebuild
from turnstile_server.errors import InvalidRequest
from turnstile_server.journal.protocol import Journal


class Archive:
    def __init__(self, journal: Journal, cached_trees: int) -> None:
        self._journal = journal
        self._cached_trees = cached_trees
        self._ended: dict[str, bytes] = {}
        self._order: dict[str, int] = {}
        self._next = 0
        self._creations: dict[str, Stored] = {}
        self._forests: OrderedDict[str, Forest] = OrderedDict()

    def __contains__(self, episode_id: str) -> bool:
        """True for every episode that was created and not deleted, running ones included."""
        return episode_id in self._order

    def created(self, stored: Stored) -> None:
        self._order[stored.episode.episode_id] = self._next
        self._next += 1
        if stored.idempotency_key is not None:
            self._creations[stored.idempotency_key] = stored

    def ended(self, episode: Episode, forest: Forest | None = None) -> None:
        """``forest``: kept for the exports that usually follow an episode's end."""
        self._ended[episode.episode_id] = episode.model_dump_json().encode()
        if forest is not None:
            self._keep(episode.episode_id, forest)

    def forget(self, episode_id: str) -> None:
        self._order.pop(episode_id, None)
        self._ended.pop(episode_id, None)
        self._forests.pop(episode_id, None)
        for key, stored in list(self._creations.items()):
            if stored.episode.episode_id == episode_id:
                del self._creations[key]

    def creation(self, idempotency_key: str | None) -> Stored | None:
        """The earlier creation with this key; None without a key."""
        return self._creations.get(idempotency_key) if idempotency_key is not None else None

    def get(self, episode_id: str) -> Episode | None:
        """The ended episode, None for any other."""
        data = self._ended.get(episode_id)
        return Episode.model_validate(orjson.loads(data)) if data is not None else None

    async def forest(self, episode_id: str) -> Forest:
        """The ended episode's forest, read from the journal unless it is still at hand."""
        forest = self._forests.get(episode_id)
        if forest is None:
            forest = rebuild(await self._journal.read(episode_id))
        self._keep(episode_id, forest)
        return forest

    def _keep(self, episode_id: str, forest: Forest) -> None:
        self._forests[episode_id] = forest
        self._forests.move_to_end(episode_id)
        while len(self._forests) > self._cached_trees:
            self._forests.popitem(last=False)

    def page(
        self,
        running: Mapping[str, EpisodeRun],
        *,
        status: EpisodeStatus | None,
        group_id: str | None,
        cursor: str | None,
        limit: int,
    ) -> EpisodePage:
        """Newest first. The cursor is the ordinal of the last episode given."""
        below = _ordinal(cursor)
        found: list[Episode] = []
        last = 0
        for episode_id in reversed(self._order):
            ordinal = self._order[episode_id]
            if below is not None and ordinal >= below:
                continue
            live = running.get(episode_id)
            episode = live.episode if live is not None else self.get(episode_id)
            if episode is None or (status is not None and episode.status != status):
                continue
            if group_id is not None and episode.group_id != group_id:
                continue
            if len(found) == limit:
                return EpisodePage(episodes=tuple(found), cursor=str(last))
            found.append(episode if live is None else live.forest.counted(episode))
            last = ordinal
        return EpisodePage(episodes=tuple(found))


def _ordinal(cursor: str | None) -> int | None:
    if cursor is None:
        return None
    if not cursor.isdigit():
        raise InvalidRequest(f"cursor {cursor!r} is not one that a page of episodes gave")
    return int(cursor)
