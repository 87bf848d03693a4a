"""All episodes in the order of their creation, found by status and group without looking at their records.

What must hold: a page costs what it returns (and a binary search), whatever the filter and however many episodes
there are; an episode is on exactly the pages that its present status and its group belong to.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass

from turnstile.models import EpisodeStatus

Filter = tuple[EpisodeStatus | None, str | None]
"""Status and group; None: any."""


@dataclass(slots=True)
class _Place:
    ordinal: int
    status: EpisodeStatus
    group_id: str | None

    def filters(self) -> set[Filter]:
        """The filters that find the episode."""
        return {(status, group) for status in (None, self.status) for group in (None, self.group_id)}


class EpisodeListing:
    def __init__(self) -> None:
        self._places: dict[str, _Place] = {}
        self._ids: dict[int, str] = {}
        self._ordinals: dict[Filter, list[int]] = {}
        """Per filter the ordinals it finds, ascending. Ordinals are never used twice."""
        self._next = 0

    def __contains__(self, episode_id: str) -> bool:
        return episode_id in self._places

    def __len__(self) -> int:
        return len(self._places)

    def add(self, episode_id: str, status: EpisodeStatus, group_id: str | None) -> None:
        """Append a new episode."""
        place = self._places[episode_id] = _Place(self._next, status, group_id)
        self._ids[self._next] = episode_id
        self._next += 1
        for key in place.filters():
            self._insert(key, place.ordinal)

    def move(self, episode_id: str, status: EpisodeStatus) -> None:
        """Record the episode's new status."""
        place = self._places[episode_id]
        before, place.status = place.filters(), status
        after = place.filters()
        for key in before - after:
            self._delete(key, place.ordinal)
        for key in after - before:
            self._insert(key, place.ordinal)

    def remove(self, episode_id: str) -> None:
        """Forget the episode. No-op if it is unknown."""
        place = self._places.pop(episode_id, None)
        if place is None:
            return
        del self._ids[place.ordinal]
        for key in place.filters():
            self._delete(key, place.ordinal)

    def page(self, found_by: Filter, before: int | None, limit: int) -> tuple[list[str], int | None]:
        """Ids of at most ``limit`` episodes, newest first, and the ``before`` of the next page (None: no more)."""
        ordinals = self._ordinals.get(found_by, [])
        end = len(ordinals) if before is None else bisect_left(ordinals, before)
        start = max(0, end - limit)
        chosen = ordinals[start:end][::-1]
        return [self._ids[ordinal] for ordinal in chosen], chosen[-1] if start > 0 else None

    def newest(self, found_by: Filter, before: int | None) -> list[tuple[int, str]]:
        """Ordinals and ids of all episodes that the filter finds, newest first."""
        ordinals = self._ordinals.get(found_by, [])
        end = len(ordinals) if before is None else bisect_left(ordinals, before)
        return [(ordinal, self._ids[ordinal]) for ordinal in reversed(ordinals[:end])]

    @property
    def head(self) -> int:
        """The ordinal that the next new episode gets."""
        return self._next

    def ordinal(self, episode_id: str) -> int:
        """Raises KeyError for an unknown episode."""
        return self._places[episode_id].ordinal

    def groups(self) -> list[tuple[str, str | None]]:
        """Every episode with its group, the oldest first."""
        return [(episode_id, self._places[episode_id].group_id) for _, episode_id in sorted(self._ids.items())]

    def _insert(self, key: Filter, ordinal: int) -> None:
        insort(self._ordinals.setdefault(key, []), ordinal)

    def _delete(self, key: Filter, ordinal: int) -> None:
        ordinals = self._ordinals[key]
        del ordinals[bisect_left(ordinals, ordinal)]
        if not ordinals:
            del self._ordinals[key]
