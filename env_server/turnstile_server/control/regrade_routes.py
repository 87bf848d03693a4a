"""The route that judges stored work again."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from turnstile.models import Regrade, RegradeRequest
from turnstile_server.control.body import JSON, read_model, while_connected
from turnstile_server.control.protocol import RegradeService


def build_regrade_router(regrades: RegradeService) -> APIRouter:
    """All routes of this module."""
    router = APIRouter()

    @router.post("/episodes/{episode_id}/regrade", response_model=Regrade)
    async def regrade(request: Request, episode_id: str) -> Response:
        """Lasts as long as the grading; a caller that goes away ends it."""
        wanted = await read_model(request, RegradeRequest)
        made = await while_connected(request, lambda: regrades.regrade(episode_id, wanted))
        if made is None:
            return Response(status_code=204)  # the caller is gone
        return Response(made.model_dump_json(), media_type=JSON)

    return router
