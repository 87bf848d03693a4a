"""Many episodes at once, over all workers: the same pages, orders and statistics as those of one server.

Implements the control API's OverviewService. Each worker applies the conditions to its own episodes; what is left
is merged, ordered and counted here, by the functions that a single server uses. A page in an order asks each
worker for as many rows as are before its end; statistics ask for a row of every episode that is meant.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import TypeVar
from urllib.parse import urlencode

import anyio
import anyio.to_thread
import orjson
from pydantic import BaseModel

from turnstile.models import (
    Episode,
    EpisodeFilter,
    EpisodeSort,
    EpisodeSummary,
    GroupSort,
    GroupSummaryPage,
    SampleSet,
    StatsKey,
    StatsReport,
    group_summaries,
    statistics_by,
)
from turnstile.models.samples_encoding import decode_samples
from turnstile_server.episodes.register_routes import WorkerRows
from turnstile_server.episodes.selection import EpisodeSelection, ordered, ordered_groups
from turnstile_server.errors import NotFound
from turnstile_server.workers.crew import Crew
from turnstile_server.workers.link import WorkerLink, relayed
from turnstile_server.workers.listing import ListedRow, WorkerPage, merge_pages, read_cursor

ModelT = TypeVar("ModelT", bound=BaseModel)
_CONDITIONS = set(EpisodeFilter.model_fields)
_Ask = Callable[[WorkerLink], Awaitable[WorkerRows]]


class JoinedOverview:
    """``threads`` bounds those that read answers and compute statistics. Methods raise WorkerRestarting where a
    worker cannot be asked: a list without its episodes would be a wrong one."""

    def __init__(self, crew: Crew, threads: anyio.CapacityLimiter) -> None:
        self._crew = crew
        self._threads = threads

    async def listed(self, wanted: EpisodeFilter, cursor: str | None, limit: int) -> tuple[list[str], str | None]:
        before = read_cursor(cursor, [link.number for link in self._crew.links])

        async def ask(link: WorkerLink) -> WorkerRows:
            return await self._rows(link, wanted, {"limit": limit, "before": before[link.number]})

        answers = await self._asked(wanted, ask)
        pages = {
            number: WorkerPage(
                [ListedRow(row.summary.episode_id, row.summary.created_at, row.ordinal) for row in found.rows],
                found.more,
                found.head,
            )
            for number, found in answers.items()
        }
        merged = merge_pages(pages, before, limit)
        for episode_id, owner in zip(merged.ids, merged.owners, strict=True):
            self._crew.owners.learn(owner, episode_id)
        return merged.ids, merged.cursor

    async def sorted_page(
        self, wanted: EpisodeFilter, sort: EpisodeSort, offset: int, limit: int, *, descending: bool
    ) -> tuple[list[str], int]:
        query = {"sort": sort, "descending": descending, "limit": offset + limit}
        answers = await self._asked(wanted, lambda link: self._rows(link, wanted, query))
        rows = self._learned(answers)
        rows = await anyio.to_thread.run_sync(
            lambda: ordered(rows, sort, descending=descending), limiter=self._threads
        )
        ids = [row.episode_id for row in rows[offset : offset + limit]]
        return ids, sum(found.total or 0 for found in answers.values())

    async def records(self, ids: Iterable[str]) -> tuple[Episode, ...]:
        return await self._told(ids, "full", Episode)

    async def summaries(self, ids: Iterable[str]) -> tuple[EpisodeSummary, ...]:
        return await self._told(ids, "summary", EpisodeSummary)

    async def stats(
        self, wanted: EpisodeFilter, by: Sequence[StatsKey], bucket_s: float | None, solved_at: float
    ) -> StatsReport:
        rows = await self._all_rows(wanted)
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
        rows = await self._all_rows(wanted)

        def found() -> GroupSummaryPage:
            groups = [each for each in group_summaries(rows) if signal is None or each.signal is signal]
            shown = ordered_groups(groups, sort, descending=descending)[offset : offset + limit]
            return GroupSummaryPage(groups=tuple(shown), total=len(groups))

        return await anyio.to_thread.run_sync(found, limiter=self._threads)

    async def samples(self, episode_id: str) -> SampleSet:
        """The samples of an episode, as people look at them: it counts as no fetch. Raises NotFound."""
        link = await self._crew.owner(episode_id)
        if link is None:
            raise NotFound(f"there is no episode {episode_id}")
        status, body = await link.fetched("GET", f"/register/episodes/{episode_id}/samples")
        if status != 200:
            raise relayed(status, body)
        return await anyio.to_thread.run_sync(decode_samples, body, limiter=self._threads)

    async def _all_rows(self, wanted: EpisodeFilter) -> list[EpisodeSummary]:
        """The newest first, as one server has them."""
        rows = self._learned(await self._asked(wanted, lambda link: self._rows(link, wanted, {})))
        return await anyio.to_thread.run_sync(
            lambda: ordered(rows, "created", descending=True), limiter=self._threads
        )

    async def _asked(self, wanted: EpisodeFilter, ask: _Ask) -> dict[int, WorkerRows]:
        EpisodeSelection(wanted)  # raises Unprocessable for conditions that cannot be read
        answers = await self._crew.each(self._crew.links, ask)
        return {link.number: found for link, found in zip(self._crew.links, answers, strict=True)}

    def _learned(self, answers: dict[int, WorkerRows]) -> list[EpisodeSummary]:
        for number, found in answers.items():
            for row in found.rows:
                self._crew.owners.learn(number, row.summary.episode_id, row.summary.group_id)
        return [row.summary for found in answers.values() for row in found.rows]

    async def _rows(self, link: WorkerLink, wanted: EpisodeFilter, more: Mapping[str, object]) -> WorkerRows:
        conditions = wanted.model_dump(mode="json", include=_CONDITIONS, exclude_none=True)
        given = {name: value for name, value in {**conditions, **more}.items() if value is not None}
        query = urlencode({name: _text(value) for name, value in given.items()}, doseq=True)
        status, body = await link.fetched("GET", f"/register/rows?{query}")
        if status != 200:
            raise relayed(status, body)
        return await anyio.to_thread.run_sync(WorkerRows.model_validate_json, body, limiter=self._threads)

    async def _told(self, ids: Iterable[str], view: str, kind: type[ModelT]) -> tuple[ModelT, ...]:
        """In this order; without those that were deleted meanwhile."""
        wanted = list(ids)
        parts: defaultdict[int, list[str]] = defaultdict(list)
        for episode_id in wanted:
            link = await self._crew.owner(episode_id)
            if link is not None:
                parts[link.number].append(episode_id)

        async def ask(link: WorkerLink) -> list[ModelT]:
            body = orjson.dumps({"ids": parts[link.number], "view": view})
            status, answer = await link.fetched("POST", "/register/records", body)
            if status != 200:
                raise relayed(status, answer)
            lines = answer.split(b"\n") if answer else []
            return await anyio.to_thread.run_sync(
                lambda: [kind.model_validate_json(line) for line in lines], limiter=self._threads
            )

        answers = await self._crew.each([self._crew.link(number) for number in parts], ask)
        found = {vars(each)["episode_id"]: each for part in answers for each in part}
        return tuple(found[episode_id] for episode_id in wanted if episode_id in found)


def _text(value: object) -> object:
    """As a query has it."""
    if isinstance(value, bool):
        return "true" if value else "false"
    return value
