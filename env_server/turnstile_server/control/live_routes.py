"""The route of the server's samples of itself."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query
from starlette.responses import Response

from turnstile.models import LiveReport
from turnstile_server.control.body import JSON
from turnstile_server.observability.live import LiveSamples


def build_live_router(samples: LiveSamples) -> APIRouter:
    router = APIRouter()

    @router.get("/live", response_model=LiveReport)
    async def live(since: Annotated[float, Query(ge=0, allow_inf_nan=False)] = 0.0) -> Response:
        """``since``: Unix seconds, the ``at`` of the last sample that the caller has."""
        return Response(samples.report(since).model_dump_json(), media_type=JSON)

    return router
