"""The routes that look at many episodes: ``/episodes``, ``/stats``, ``/groups`` and ``/groups/{id}``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal, get_args

import anyio
import anyio.to_thread
from fastapi import APIRouter, Path, Query, Request
from pydantic import BaseModel, Field
from starlette.responses import Response

from turnstile.models import (
    CLIENT_ID_PATTERN,
    EpisodeFilter,
    EpisodePage,
    EpisodeSort,
    EpisodeSummaryPage,
    GroupReport,
    GroupSort,
    GroupSummaryPage,
    StatsKey,
    StatsReport,
)
from turnstile_server.control.body import JSON, long_json, while_connected
from turnstile_server.control.protocol import GroupService, OverviewService
from turnstile_server.errors import InvalidRequest, Unprocessable

MAX_PAGE = 1000
"""Ceiling of ``GET /episodes?limit=``."""


class EpisodesQuery(EpisodeFilter):
    """Query of ``GET /episodes``."""

    view: Literal["full", "summary"] = Field(
        default="full", description="`full`: whole records. `summary`: a light row of each."
    )
    cursor: str | None = Field(default=None, description="Of the page before. Not with `sort`, `order`, `offset`.")
    sort: EpisodeSort | None = Field(default=None, description="None: the newest first, by cursor.")
    order: Literal["asc", "desc"] | None = Field(default=None, description="None: `desc`. Not with `cursor`.")
    offset: int | None = Field(default=None, ge=0, description="So many are left out; the page then has `total`.")
    limit: int | None = Field(default=None, ge=1, le=MAX_PAGE, description="None: `control.page_size`.")


class StatsQuery(EpisodeFilter):
    """Query of ``GET /stats``."""

    by: str = Field(default="", description="What to group by: names of `StatsKey` with commas between them.")
    bucket: float | None = Field(
        default=None, ge=1, allow_inf_nan=False, description="Seconds of one interval of time."
    )
    solved_at: float = Field(default=1.0, allow_inf_nan=False, description="The least reward that is a success.")


class GroupsQuery(EpisodeFilter):
    """Query of ``GET /groups``: the conditions are of the episodes that are counted."""

    signal: bool | None = Field(
        default=None, description="Whether two of its rewards differ; only groups with two rewards have an answer."
    )
    sort: GroupSort = "created"
    order: Literal["asc", "desc"] = "desc"
    offset: int = Field(default=0, ge=0)
    limit: int | None = Field(default=None, ge=1, le=MAX_PAGE, description="None: `control.page_size`.")


def build_overview_router(
    overview: OverviewService, groups: GroupService, page_size: int, workers: anyio.CapacityLimiter
) -> APIRouter:
    """All routes of this module. ``workers`` bounds the threads that write answers."""
    router = APIRouter()
    listing = anyio.Lock()
    """One page at a time: each holds up to ``MAX_PAGE`` records."""

    async def answer(found: BaseModel, name: str, items: Sequence[BaseModel]) -> Response:
        """``items``: the field ``name``, which is long."""
        written = await anyio.to_thread.run_sync(long_json, found, name, items, limiter=workers)
        return Response(written, media_type=JSON)

    @router.get("/episodes", response_model=EpisodePage | EpisodeSummaryPage)
    async def page(query: Annotated[EpisodesQuery, Query()]) -> Response:
        limit = query.limit or page_size
        async with listing:
            if query.sort is None and query.offset is None and query.order is None:
                ids, cursor = await overview.listed(query, query.cursor, limit)
                total = None
            elif query.cursor is not None:
                raise InvalidRequest("cursor: pages by `sort`, `order` or `offset` have none; go on by `offset`")
            else:
                descending = query.order != "asc"
                ids, total = await overview.sorted_page(
                    query, query.sort or "created", query.offset or 0, limit, descending=descending
                )
                cursor = None
            if query.view == "full":
                records = await overview.records(ids)
                return await answer(EpisodePage(episodes=records, cursor=cursor, total=total), "episodes", records)
            rows = await overview.summaries(ids)
            return await answer(EpisodeSummaryPage(summaries=rows, cursor=cursor, total=total), "summaries", rows)

    @router.get("/stats", response_model=StatsReport)
    async def stats(query: Annotated[StatsQuery, Query()]) -> Response:
        found = await overview.stats(query, _keys(query.by), query.bucket, query.solved_at)
        return await answer(found, "rows", found.rows)

    @router.get("/groups", response_model=GroupSummaryPage)
    async def many_groups(query: Annotated[GroupsQuery, Query()]) -> Response:
        found = await overview.groups(
            query,
            query.sort,
            query.offset,
            query.limit or page_size,
            signal=query.signal,
            descending=query.order == "desc",
        )
        return await answer(found, "groups", found.groups)

    @router.get("/groups/{group_id}", response_model=GroupReport)
    async def group(request: Request, group_id: Annotated[str, Path(pattern=CLIENT_ID_PATTERN)]) -> Response:
        found = await while_connected(request, lambda: groups.group(group_id))
        if found is None:
            return Response(status_code=204)  # the caller is gone
        return await answer(found, "nodes", found.nodes)

    return router


def _keys(names: str) -> list[StatsKey]:
    """Raises Unprocessable for a name that is none."""
    found: list[StatsKey] = []
    for name in filter(None, names.split(",")):
        key = next((each for each in get_args(StatsKey) if each == name), None)
        if key is None:
            raise Unprocessable(f"by: there is no {name!r}; choose of {', '.join(get_args(StatsKey))}")
        if key not in found:
            found.append(key)
    return found
