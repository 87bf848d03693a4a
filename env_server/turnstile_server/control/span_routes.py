"""The route of an episode's spans."""

from __future__ import annotations

import anyio
import anyio.to_thread
from fastapi import APIRouter
from starlette.responses import Response

from turnstile.models import SpanReport
from turnstile_server.control.body import JSON
from turnstile_server.control.protocol import SpanService


def build_span_router(spans: SpanService, workers: anyio.CapacityLimiter) -> APIRouter:
    """``workers`` bounds the threads that encode reports."""
    router = APIRouter()

    @router.get("/episodes/{episode_id}/spans", response_model=SpanReport)
    async def spans_of(episode_id: str) -> Response:
        report = await spans.report(episode_id)
        return Response(await anyio.to_thread.run_sync(report.model_dump_json, limiter=workers), media_type=JSON)

    return router
