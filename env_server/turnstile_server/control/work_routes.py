"""The route that shows the kept work of an episode as a diff."""

from __future__ import annotations

import anyio.to_thread
from fastapi import APIRouter, Request
from starlette.responses import Response

from turnstile.models import WorkDiff
from turnstile_server.control.body import JSON, while_connected
from turnstile_server.control.protocol import WorkViews


def build_work_router(views: WorkViews) -> APIRouter:
    """All routes of this module."""
    router = APIRouter()

    @router.get("/episodes/{episode_id}/work", response_model=WorkDiff)
    async def work(request: Request, episode_id: str) -> Response:
        """Makes a sandbox the first time; a caller that goes away ends it."""
        found = await while_connected(request, lambda: views.work(episode_id))
        if found is None:
            return Response(status_code=204)  # the caller is gone
        written = await anyio.to_thread.run_sync(found.model_dump_json)  # of megabytes
        return Response(written, media_type=JSON)

    return router
