"""Pages of episodes that several workers have, as one list. Pure.

Each worker lists its own episodes, the newest first, by ordinals. The list of all takes the newest of what comes
next in each, by the time of its creation. What must hold: following the cursors gives each episode once, those of
one worker in its order, and no episode that was created after the first page.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from turnstile_server.errors import InvalidRequest

_PLACE = re.compile(r"([0-9]{1,9})-([0-9]{1,18})")


@dataclass(frozen=True, slots=True)
class ListedRow:
    """An episode in a worker's list."""

    episode_id: str
    created_at: float
    ordinal: int


@dataclass(frozen=True, slots=True)
class WorkerPage:
    """A worker's list from its place on. ``more``: there are rows behind the last one. ``head``: the place beyond
    its newest episode."""

    rows: Sequence[ListedRow]
    more: bool
    head: int


@dataclass(frozen=True, slots=True)
class MergedPage:
    """``owners``: the worker of each of ``ids``. ``cursor``: of the next page; None: this is the last."""

    ids: list[str] = field(default_factory=list)
    owners: list[int] = field(default_factory=list)
    cursor: str | None = None


def read_cursor(cursor: str | None, workers: Iterable[int]) -> dict[int, int | None]:
    """The place of each worker's list from which on it goes on: before that ordinal; None: from its newest on.
    Raises InvalidRequest for a cursor that no page gave."""
    places: dict[int, int | None] = dict.fromkeys(workers)
    if cursor is None:
        return places
    for part in cursor.split("."):
        found = _PLACE.fullmatch(part)
        if found is None:
            raise InvalidRequest("cursor: not one that a page of this list gave; leave it out for the first page")
        number = int(found[1])
        if number in places:
            places[number] = int(found[2])
    # A worker that there was not then has nothing that belongs behind that page.
    return {number: 0 if place is None else place for number, place in places.items()}


def write_cursor(places: Mapping[int, int]) -> str:
    return ".".join(f"{number}-{place}" for number, place in sorted(places.items()))


def merge_pages(pages: Mapping[int, WorkerPage], before: Mapping[int, int | None], limit: int) -> MergedPage:
    """The next ``limit`` episodes of all. ``pages``: of each worker, from ``before`` on; a page has ``limit`` rows
    or all that there are."""
    taken = dict.fromkeys(pages, 0)
    places = {number: _start(before[number], page.head) for number, page in pages.items()}
    merged = MergedPage()
    while len(merged.ids) < limit:
        heads = {
            number: page.rows[taken[number]] for number, page in pages.items() if taken[number] < len(page.rows)
        }
        if not heads:
            break
        newest = max(heads, key=lambda number: (heads[number].created_at, heads[number].episode_id))
        row = heads[newest]
        merged.ids.append(row.episode_id)
        merged.owners.append(newest)
        places[newest] = row.ordinal
        taken[newest] += 1
    more = any(page.more or taken[number] < len(page.rows) for number, page in pages.items())
    return MergedPage(merged.ids, merged.owners, write_cursor(places) if more else None)


def _start(before: int | None, head: int) -> int:
    return head if before is None else before
