"""The groups of episodes: since when each is there, its oldest weights, and whether it takes more episodes.

Groups with open episodes are always known; of the others the latest ``remembered_groups`` of ``bounds``. A
restart of the server forgets them.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass


@dataclass(slots=True, eq=False)
class EpisodeGroup:
    """The episodes with one ``group_id``; an episode without one is a group of its own, which nobody else finds.

    ``since``: when its first episode came, monotonic seconds.
    """

    group_id: str | None
    since: float
    first_version: str | None = None
    """The oldest weights that sampled a token of its episodes, since it began (again)."""
    closed: str | None = None
    """Reason why it gets no further episode; None while it does."""
    open: int = 0
    """Its episodes that have not ended."""


class EpisodeGroups:
    """``remembered``: how many groups without an open episode are kept."""

    def __init__(self, remembered: int) -> None:
        self._remembered = remembered
        self._groups: dict[str, EpisodeGroup] = {}
        self._idle: OrderedDict[str, EpisodeGroup] = OrderedDict()

    def of(self, group_id: str | None, now: float) -> EpisodeGroup:
        """The group with this id, a new one where none is known."""
        if group_id is None:
            return EpisodeGroup(None, now)
        group = self._groups.get(group_id)
        if group is None:
            group = self._groups[group_id] = EpisodeGroup(group_id, now)
            self._rest(group)
        return group

    def opened(self, group: EpisodeGroup) -> None:
        """An episode of the group was made."""
        group.open += 1
        if group.group_id is not None:
            self._idle.pop(group.group_id, None)

    def ended(self, group: EpisodeGroup) -> None:
        """An episode of the group has ended."""
        group.open -= 1
        if not group.open:
            self._rest(group)

    def _rest(self, group: EpisodeGroup) -> None:
        if group.group_id is None:
            return
        self._idle[group.group_id] = group
        while len(self._idle) > self._remembered:
            forgotten, _ = self._idle.popitem(last=False)
            del self._groups[forgotten]

    def __len__(self) -> int:
        return len(self._groups)
