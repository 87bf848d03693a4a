"""The routes by which people look at tokens and breaks: what a viewer shows, and a notebook can ask for."""

from __future__ import annotations

from typing import Annotated

import anyio
import anyio.to_thread
from fastapi import APIRouter, Query
from pydantic import BaseModel
from starlette.responses import Response

from turnstile.models import BreakReport, TokenMatches, TokenWindow
from turnstile.models.base import MAX_INT32
from turnstile_server.control.body import JSON
from turnstile_server.control.bounds import ControlBounds
from turnstile_server.control.protocol import InspectionService
from turnstile_server.errors import InvalidRequest
from turnstile_server.settings import ControlSettings


def build_inspection_router(
    inspector: InspectionService, settings: ControlSettings, workers: anyio.CapacityLimiter
) -> APIRouter:
    """All routes of this module. Bounds stand in defaults: annotations do not see ``bounds``.
    ``workers`` bounds the threads that write answers."""
    router, bounds = APIRouter(), settings.bounds_of(ControlBounds)

    async def answer(found: BaseModel) -> Response:
        written = await anyio.to_thread.run_sync(found.model_dump_json, limiter=workers)
        return Response(written, media_type=JSON)

    @router.get("/turns/{turn_id}/tokens", response_model=TokenWindow)
    async def tokens(
        turn_id: str,
        start: Annotated[int, Query(ge=0, le=MAX_INT32)] = 0,
        count: int = Query(bounds.window_tokens, ge=0, le=bounds.window_tokens),
        episode_id: str | None = None,
    ) -> Response:
        return await answer(await inspector.window(turn_id, start, count, episode_id))

    @router.get("/turns/{turn_id}/tokens/find", response_model=TokenMatches)
    async def find(
        turn_id: str,
        text: str | None = None,
        id: Annotated[int | None, Query(ge=0, le=MAX_INT32)] = None,
        after: Annotated[int, Query(ge=-1, le=MAX_INT32)] = -1,
        limit: int = Query(bounds.found_tokens, ge=1, le=bounds.found_tokens),
        episode_id: str | None = None,
    ) -> Response:
        wanted = text if id is None else id
        if wanted is None or (text is not None and id is not None):
            raise InvalidRequest("name what to find, as text or as id: one of the two")
        return await answer(await inspector.find(turn_id, wanted, after, limit, episode_id))

    @router.get("/episodes/{episode_id}/breaks", response_model=BreakReport)
    async def breaks(
        episode_id: str,
        offset: Annotated[int, Query(ge=0, le=MAX_INT32)] = 0,
        limit: int = Query(bounds.shown_breaks, ge=1, le=bounds.shown_breaks),
    ) -> Response:
        return await answer(await inspector.breaks(episode_id, offset, limit))

    return router
