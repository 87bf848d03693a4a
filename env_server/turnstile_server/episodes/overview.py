"""Many episodes at once: listings by any condition and order, and statistics.

What must hold: a page of the plain listing (by status and group, the newest first) costs what it returns, whatever
there is; anything else looks at every summary; whatever is looked at, the event loop serves others every few
milliseconds; and a page shows each episode as it is now, running ones too.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from contextlib import aclosing, suppress
from typing import TypeVar

import anyio.lowlevel
import anyio.to_thread

from turnstile.models import (
    Episode,
    EpisodeFilter,
    EpisodeSort,
    EpisodeSummary,
    GroupSort,
    GroupSummaryPage,
    StatsKey,
    StatsReport,
    explained,
    group_summaries,
    statistics_by,
    summary_of,
)
from turnstile_server.control.body import cursor_position
from turnstile_server.episodes.archive import Archive
from turnstile_server.episodes.selection import EpisodeSelection, ordered, ordered_groups
from turnstile_server.errors import NotFound

_PIECE_S = 0.005
"""So long rows and records are looked at before the event loop serves others."""


T = TypeVar("T")


class Overview:
    """``now``: the record of any episode as it is now; raises NotFound. ``threads`` bounds those that compute
    statistics."""

    def __init__(self, archive: Archive, now: Callable[[str], Episode], threads: anyio.CapacityLimiter) -> None:
        self._archive = archive
        self._now = now
        self._threads = threads

    async def listed(self, wanted: EpisodeFilter, cursor: str | None, limit: int) -> tuple[list[str], str | None]:
        """As ``page``; a cursor is the ``before`` of the next page as text. Raises InvalidRequest."""
        ids, following = await self.page(wanted, cursor_position(cursor), limit)
        return ids, None if following is None else str(following)

    async def page(self, wanted: EpisodeFilter, before: int | None, limit: int) -> tuple[list[str], int | None]:
        """Ids of at most ``limit`` episodes, the newest first, and the ``before`` of the next page (None: this is
        the last)."""
        selection = EpisodeSelection(wanted)
        if selection.indexed_only:
            return self._archive.page(wanted.status, wanted.group_id, before, limit)
        found: list[str] = []
        last: int | None = None
        async with aclosing(self._chosen(wanted, selection, before)) as chosen:
            async for ordinal, row in chosen:
                if len(found) == limit:
                    return found, last
                found.append(row.episode_id)
                last = ordinal
        return found, None

    async def rows(
        self, wanted: EpisodeFilter, before: int | None, limit: int | None
    ) -> tuple[list[tuple[int, EpisodeSummary]], bool]:
        """At most ``limit`` episodes (None: all), the newest first, each with its ordinal; and whether there are
        more behind them."""
        selection, found = EpisodeSelection(wanted), list[tuple[int, EpisodeSummary]]()
        if selection.indexed_only and limit is not None:
            ids, following = self._archive.page(wanted.status, wanted.group_id, before, limit)
            return [(self._archive.ordinal(each), self._summary(each)) for each in ids], following is not None
        async with aclosing(self._chosen(wanted, selection, before)) as chosen:
            async for each in chosen:
                if limit is not None and len(found) == limit:
                    return found, True
                found.append(each)
        return found, False

    async def sorted_page(
        self, wanted: EpisodeFilter, sort: EpisodeSort, offset: int, limit: int, *, descending: bool
    ) -> tuple[list[str], int]:
        """Ids of at most ``limit`` episodes from the ``offset``-th on, and how many there are in all."""
        rows = [row async for _, row in self._chosen(wanted, EpisodeSelection(wanted), None)]
        rows = await anyio.to_thread.run_sync(
            lambda: ordered(rows, sort, descending=descending), limiter=self._threads
        )
        return [row.episode_id for row in rows[offset : offset + limit]], len(rows)

    async def records(self, ids: Iterable[str]) -> tuple[Episode, ...]:
        """Without those that were deleted meanwhile."""
        return await _found(lambda episode_id: explained(self._now(episode_id)), ids)

    async def summaries(self, ids: Iterable[str]) -> tuple[EpisodeSummary, ...]:
        """Without those that were deleted meanwhile."""
        return await _found(self._summary, ids)

    def _summary(self, episode_id: str) -> EpisodeSummary:
        """Raises NotFound."""
        return self._archive.summary(episode_id) or summary_of(self._now(episode_id))

    async def stats(
        self, wanted: EpisodeFilter, by: Sequence[StatsKey], bucket_s: float | None, solved_at: float
    ) -> StatsReport:
        rows = [row async for _, row in self._chosen(wanted, EpisodeSelection(wanted), None)]
        return await anyio.to_thread.run_sync(
            lambda: statistics_by(rows, by, bucket_s=bucket_s, solved_at=solved_at), limiter=self._threads
        )

    async def groups(
        self,
        wanted: EpisodeFilter,
        sort: GroupSort,
        offset: int,
        limit: int,
        *,
        signal: bool | None,
        descending: bool,
    ) -> GroupSummaryPage:
        """The groups of the episodes that match. ``signal``: only groups whose ``signal`` is this."""
        rows = [row async for _, row in self._chosen(wanted, EpisodeSelection(wanted), None)]

        def found() -> GroupSummaryPage:
            groups = [each for each in group_summaries(rows) if signal is None or each.signal is signal]
            shown = ordered_groups(groups, sort, descending=descending)[offset : offset + limit]
            return GroupSummaryPage(groups=tuple(shown), total=len(groups))

        return await anyio.to_thread.run_sync(found, limiter=self._threads)

    async def _chosen(
        self, wanted: EpisodeFilter, selection: EpisodeSelection, before: int | None
    ) -> AsyncGenerator[tuple[int, EpisodeSummary], None]:
        """The episodes that are meant, the newest first, each with its ordinal in the listing."""
        pieces = _Pieces()
        for ordinal, episode_id in self._archive.newest(wanted.status, wanted.group_id, before):
            await pieces.rest()
            try:
                row = self._summary(episode_id)
                taken = selection.takes(row, self._now)
            except NotFound:  # deleted while others were served
                continue
            if taken:
                yield ordinal, row


class _Pieces:
    """A long look on the event loop, in pieces of ``_PIECE_S``."""

    def __init__(self) -> None:
        self._ends = time.monotonic() + _PIECE_S

    async def rest(self) -> None:
        """At the end of a piece, serves others."""
        if time.monotonic() >= self._ends:
            await anyio.lowlevel.checkpoint()
            self._ends = time.monotonic() + _PIECE_S


async def _found(find: Callable[[str], T], ids: Iterable[str]) -> tuple[T, ...]:
    pieces, found = _Pieces(), list[T]()
    for episode_id in ids:
        await pieces.rest()
        with suppress(NotFound):
            found.append(find(episode_id))
    return tuple(found)
