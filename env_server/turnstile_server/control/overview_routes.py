"""The routes that look at many episodes: ``GET /episodes``, ``GET /stats`` and ``GET /groups/{id}``."""

from __future__ import annotations

from typing import Annotated, Literal, get_args

import anyio
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
    StatsKey,
    StatsReport,
)
from turnstile_server.control.body import JSON, cursor_position, while_connected
from turnstile_server.control.protocol import GroupService, OverviewService
from turnstile_server.errors import InvalidRequest, Unprocessable

MAX_PAGE = 1000
"""Ceiling of ``GET /episodes?limit=``."""


class EpisodesQuery(EpisodeFilter):
    """Query of ``GET /episodes``."""

    view: Literal["full", "summary"] = Field(
        default="full", description="`full`: whole records. `summary`: a light row of each."
    )
    cursor: str | None = Field(default=None, description="Of the page before. Not with `sort` or `offset`.")
    sort: EpisodeSort | None = Field(default=None, description="None: the newest first, by cursor.")
    order: Literal["asc", "desc"] = "desc"
    offset: int | None = Field(default=None, ge=0, description="So many are left out; the page then has `total`.")
    limit: int | None = Field(default=None, ge=1, le=MAX_PAGE, description="None: `control.page_size`.")


class StatsQuery(EpisodeFilter):
    """Query of ``GET /stats``."""

    by: str = Field(default="", description="What to group by: names of `StatsKey` with commas between them.")
    bucket: float | None = Field(default=None, gt=0, description="Seconds of one interval of time.")
    solved_at: float = Field(default=1.0, allow_inf_nan=False, description="The least reward that is a success.")


def build_overview_router(overview: OverviewService, groups: GroupService, page_size: int) -> APIRouter:
    """All routes of this module."""
    router = APIRouter()
    listing = anyio.Lock()
    """The event loop serves others between two pages, each of which takes some milliseconds."""

    @router.get("/episodes", response_model=EpisodePage | EpisodeSummaryPage)
    async def page(query: Annotated[EpisodesQuery, Query()]) -> Response:
        limit = query.limit or page_size
        async with listing:
            if query.sort is None and query.offset is None:
                ids, following = await overview.page(query, cursor_position(query.cursor), limit)
                cursor, total = None if following is None else str(following), None
            elif query.cursor is not None:
                raise InvalidRequest("cursor: pages by `sort` or `offset` have none; go on by `offset`")
            else:
                descending = query.order == "desc"
                ids, total = await overview.sorted_page(
                    query, query.sort or "created", query.offset or 0, limit, descending=descending
                )
                cursor = None
            if query.view == "full":
                return _json(EpisodePage(episodes=overview.records(ids), cursor=cursor, total=total))
            return _json(EpisodeSummaryPage(summaries=overview.summaries(ids), cursor=cursor, total=total))

    @router.get("/stats", response_model=StatsReport)
    async def stats(query: Annotated[StatsQuery, Query()]) -> Response:
        return _json(await overview.stats(query, _keys(query.by), query.bucket, query.solved_at))

    @router.get("/groups/{group_id}", response_model=GroupReport)
    async def group(request: Request, group_id: Annotated[str, Path(pattern=CLIENT_ID_PATTERN)]) -> Response:
        found = await while_connected(request, lambda: groups.group(group_id))
        return _json(found) if found is not None else Response(status_code=204)  # the caller is gone

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


def _json(found: BaseModel) -> Response:
    return Response(found.model_dump_json(), media_type=JSON)
