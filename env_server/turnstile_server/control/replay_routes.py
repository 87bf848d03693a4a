"""The routes of the states of episodes' work folders."""

from __future__ import annotations

from typing import Annotated, Any

import anyio
import anyio.to_thread
from fastapi import APIRouter, Query
from pydantic import BaseModel
from starlette.responses import Response

from turnstile.models import ReplayListing, ReplayReport
from turnstile.models.base import MAX_INT32
from turnstile_server.control.body import JSON
from turnstile_server.control.protocol import ReplayService

_BYTES = "application/octet-stream"
_CONTENT: dict[int | str, dict[str, Any]] = {
    200: {"content": {_BYTES: {"schema": {"type": "string", "format": "binary"}}}}
}


def build_replay_router(replays: ReplayService, workers: anyio.CapacityLimiter) -> APIRouter:
    """All routes of this module. ``workers`` bounds the threads that write answers."""
    router = APIRouter()

    async def answer(found: BaseModel) -> Response:
        written = await anyio.to_thread.run_sync(found.model_dump_json, limiter=workers)
        return Response(written, media_type=JSON)

    @router.get("/episodes/{episode_id}/replay", response_model=ReplayReport)
    async def states(episode_id: str) -> Response:
        return await answer(await replays.report(episode_id))

    @router.get("/episodes/{episode_id}/replay/files", response_model=ReplayListing)
    async def files(episode_id: str, state: Annotated[int, Query(ge=0, le=MAX_INT32)]) -> Response:
        return await answer(await replays.listing(episode_id, state))

    @router.get("/episodes/{episode_id}/replay/{digest}", response_class=Response, responses=_CONTENT)
    async def content(episode_id: str, digest: str) -> Response:
        """An agent wrote these bytes: no browser may take them for a page."""
        data = await replays.content(episode_id, digest)
        headers = {
            "content-disposition": f'attachment; filename="{digest}"',
            "x-content-type-options": "nosniff",
            "content-security-policy": "default-src 'none'; sandbox",
        }
        return Response(data, headers=headers, media_type=_BYTES)

    return router
