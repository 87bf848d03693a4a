"""Reports of one of several worker processes to the process in front: its load, and the episodes that it has.

Served on the worker's own socket alone, below ``/register``; the process in front (``workers/``) passes no request
there. A directory that is only read has these routes too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, Literal

import anyio
import anyio.to_thread
from fastapi import APIRouter, Query
from pydantic import BaseModel, Field
from starlette.responses import Response

from turnstile.models import EpisodeFilter, EpisodeSort, EpisodeSummary
from turnstile.models.samples_encoding import MEDIA_TYPE as SAFETENSORS
from turnstile.models.samples_encoding import sample_parts
from turnstile_server.control.body import JSON
from turnstile_server.control.results import parts_response
from turnstile_server.episodes.reader import EpisodeReader

PREFIX = "/register"


class WorkerState(BaseModel):
    """Answer to ``GET /register/state``."""

    open: int
    """Episodes that have not ended."""
    refusal: str | None
    """Reason why it takes no new episodes."""
    held: bool
    """Its model calls wait: a pause, an update, sleep."""


class WorkerRegister(BaseModel):
    """Answer to ``GET /register/episodes``: id, group and idempotency key of each, the oldest first."""

    episodes: list[tuple[str, str | None, str | None]]


class WorkerRow(BaseModel):
    """``ordinal``: the episode's place among the worker's own; a later one has a larger one."""

    ordinal: int
    summary: EpisodeSummary


class WorkerRows(BaseModel):
    """Answer to ``GET /register/rows``."""

    rows: list[WorkerRow]
    more: bool
    """True if there are more behind the last one."""
    head: int
    """The ordinal of the next new episode."""
    total: int | None
    """All that the filters leave, where rows were asked for in an order."""


class RowsQuery(EpisodeFilter):
    """Query of ``GET /register/rows``. ``sort``: the first ``limit`` in that order; None: the newest first."""

    sort: EpisodeSort | None = None
    descending: bool = True
    before: int | None = None
    limit: int | None = Field(default=None, ge=0)


class WantedRecords(BaseModel):
    """Body of ``POST /register/records``."""

    ids: list[str]
    view: Literal["full", "summary"] = "full"


def build_register_router(
    episodes: EpisodeReader,
    refusal: Callable[[], str | None],
    held: Callable[[], bool],
    workers: anyio.CapacityLimiter,
) -> APIRouter:
    """``refusal``: why no new episode is taken. ``held``: whether model calls wait. ``workers`` bounds the threads
    that write answers."""
    router = APIRouter(prefix=PREFIX, include_in_schema=False)
    overview = episodes.overview

    async def answer(found: BaseModel) -> Response:
        return Response(await anyio.to_thread.run_sync(found.model_dump_json, limiter=workers), media_type=JSON)

    @router.get("/state")
    async def state() -> Response:
        found = WorkerState(open=episodes.open_count, refusal=refusal(), held=held())
        return Response(found.model_dump_json(), media_type=JSON)

    @router.get("/episodes")
    async def register() -> Response:
        return await answer(WorkerRegister(episodes=episodes.register()))

    @router.get("/episodes/{episode_id}")
    async def known(episode_id: str) -> Response:
        return Response(status_code=204 if episode_id in episodes else 404)

    @router.get("/episodes/{episode_id}/samples")
    async def samples(episode_id: str) -> Response:
        """For people to look at; it counts as no fetch by a trainer."""
        found = await episodes.samples(episode_id)
        return await parts_response(sample_parts(found), SAFETENSORS, None, workers)

    @router.get("/rows")
    async def rows(query: Annotated[RowsQuery, Query()]) -> Response:
        head = episodes.head  # taken first: what comes meanwhile belongs before the first page
        if query.sort is None:
            found, more = await overview.rows(query, query.before, query.limit)
            listed = [WorkerRow(ordinal=ordinal, summary=summary) for ordinal, summary in found]
            return await answer(WorkerRows(rows=listed, more=more, head=head, total=None))
        limit = 0 if query.limit is None else query.limit
        ids, total = await overview.sorted_page(query, query.sort, 0, limit, descending=query.descending)
        summaries = await overview.summaries(ids)
        listed = [WorkerRow(ordinal=0, summary=summary) for summary in summaries]
        return await answer(WorkerRows(rows=listed, more=total > limit, head=head, total=total))

    @router.post("/records")
    async def records(wanted: WantedRecords) -> Response:
        """One record a line, in the order of the ids; without those that were deleted meanwhile."""
        found: Sequence[BaseModel]
        if wanted.view == "full":
            found = await overview.records(wanted.ids)
        else:
            found = await overview.summaries(wanted.ids)

        def written() -> bytes:
            return b"\n".join(record.model_dump_json().encode() for record in found)

        return Response(
            await anyio.to_thread.run_sync(written, limiter=workers), media_type="application/x-ndjson"
        )

    return router
