"""The REST routes of the control API that change episodes, those of the trainer's sampling, and the probes.

Owns the shapes of requests and answers. Decides nothing: episodes belong to the ``EpisodeService``, the engine to
the ``Engine``, and ``control/errors.py`` turns their typed errors into statuses.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import anyio
from fastapi import APIRouter, Path, Query, Request
from pydantic import BaseModel
from starlette.responses import JSONResponse, Response

from turnstile.models import (
    CLIENT_ID_PATTERN,
    AuditReport,
    CompletionRequest,
    EpisodeRequest,
    LeaseTerm,
    RewardUpdate,
    TrainedRequest,
    explained,
)
from turnstile_server.control.agent_address import AgentAddress
from turnstile_server.control.body import JSON, read_model, while_connected
from turnstile_server.control.bounds import ControlBounds
from turnstile_server.control.protocol import EpisodeService
from turnstile_server.control.trainer_sampling import TrainerSampling
from turnstile_server.engines.admin import EngineAdmin
from turnstile_server.observability.metrics import CONTENT_TYPE as METRICS_TYPE
from turnstile_server.observability.metrics import Metrics
from turnstile_server.settings import ControlSettings
from turnstile_server.trace_context import is_traceparent


@dataclass(frozen=True, slots=True)
class ControlParts:
    """The parts that the routes are built from. ``closing`` is set when the server stops: long polls then answer.
    ``address``: the agent listener's."""

    episodes: EpisodeService
    training: TrainerSampling
    engine: EngineAdmin
    metrics: Metrics
    settings: ControlSettings
    closing: anyio.Event
    address: AgentAddress
    pause_alarm_s: float
    """``/ready`` is 503 while model calls have been held for longer."""
    inexact: tuple[str, ...] = ()
    """What is not exact with the model (``rendering/model_report.py``); ``/ready`` says it."""


def build_router(parts: ControlParts) -> APIRouter:
    """All routes of this module."""
    router = APIRouter()
    _add_open_routes(router, parts)
    _add_episode_routes(router, parts)
    _add_training_routes(router, parts)
    _add_watch_routes(router, parts)
    return router


def _add_open_routes(router: APIRouter, parts: ControlParts) -> None:
    @router.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "healthy"}

    @router.get("/ready")
    async def ready() -> Response:
        """Readiness: 200 if new episodes are taken and their model calls served, else 503. ``model``: what is not
        exact with the model that is served. These routes serve once all is started; ``http/starting.py`` answers
        before."""
        refusal = parts.episodes.refusal
        if refusal is not None:
            draining = parts.episodes.draining
            reason = refusal if draining else f"new episodes and turns are refused: {refusal}"
            return JSONResponse({"status": "not ready", "reason": reason}, 503)
        unserved = parts.engine.why_none_serves
        if unserved is not None:
            return JSONResponse({"status": "not ready", "reason": unserved}, 503)
        waits_s = parts.engine.held_s
        model = {"model": list(parts.inexact)} if parts.inexact else {}
        if waits_s is None:
            return JSONResponse({"status": "ready", **model})
        held = f"model calls wait: the engine is paused, updated or asleep since {waits_s:.0f} s"
        if waits_s > parts.pause_alarm_s:
            return JSONResponse({"status": "not ready", "reason": held}, 503)
        return JSONResponse({"status": "ready", "engine": held, **model})


def _add_episode_routes(router: APIRouter, parts: ControlParts) -> None:
    episodes = parts.episodes

    @router.post("/episodes", status_code=201)
    async def create(request: Request) -> Response:
        wanted = _traced(await read_model(request, EpisodeRequest), request.headers.get("traceparent"))
        created, is_new = await episodes.create(wanted, parts.address.of(request.scope))
        return _model(created, 201 if is_new else 200)

    @router.delete("/episodes/{episode_id}", status_code=204)
    async def delete(episode_id: str) -> Response:
        await episodes.delete(episode_id)
        return Response(status_code=204)

    @router.post("/episodes/{episode_id}/finish")
    async def finish(episode_id: str) -> Response:
        return _model(explained(await episodes.finish(episode_id)))

    @router.post("/episodes/{episode_id}/cancel")
    async def cancel(episode_id: str) -> Response:
        return _model(explained(await episodes.cancel(episode_id)))

    @router.post("/episodes/{episode_id}/reward")
    async def reward(request: Request, episode_id: str) -> Response:
        return _model(explained(await episodes.reward(episode_id, await read_model(request, RewardUpdate))))

    @router.post("/episodes/{episode_id}/trained")
    async def trained(request: Request, episode_id: str) -> Response:
        return _model(explained(await episodes.trained(episode_id, await read_model(request, TrainedRequest))))

    @router.post("/episodes/{episode_id}/audit", response_model=AuditReport)
    async def audit(request: Request, episode_id: str) -> Response:
        report = await while_connected(request, lambda: episodes.audit(episode_id))
        return _model(report) if report is not None else Response(status_code=204)  # the caller is gone

    @router.post("/leases/{lease_id}")
    async def renew_lease(request: Request, lease_id: Annotated[str, Path(pattern=CLIENT_ID_PATTERN)]) -> Response:
        return _model(episodes.renew_lease(lease_id, (await read_model(request, LeaseTerm)).lease_s))


def _add_training_routes(router: APIRouter, parts: ControlParts) -> None:
    training, settings = parts.training, parts.settings

    @router.get("/episodes/{episode_id}/pending")
    async def pending(
        request: Request, episode_id: str, wait: Annotated[float, Query(ge=0, allow_inf_nan=False)] = 0.0
    ) -> Response:
        found = None
        if wait > 0:
            wait_s = min(wait, settings.bounds_of(ControlBounds).max_wait_s)
            found = await while_connected(request, lambda: training.pending(episode_id, wait_s), parts.closing)
        return _model(found if found is not None else await training.pending(episode_id))

    @router.post("/episodes/{episode_id}/completions")
    async def complete(request: Request, episode_id: str) -> Response:
        return _model(await training.complete(episode_id, await read_model(request, CompletionRequest)))


def _add_watch_routes(router: APIRouter, parts: ControlParts) -> None:
    @router.get("/metrics")
    async def metrics() -> Response:
        return Response(parts.metrics.exposition(), media_type=METRICS_TYPE)


def _model(found: BaseModel, status: int = 200) -> Response:
    return Response(found.model_dump_json(), status, media_type=JSON)


def _traced(wanted: EpisodeRequest, traceparent: str | None) -> EpisodeRequest:
    """With the header's trace, where the body names none. One that is not W3C's is ignored, as it says."""
    if wanted.traceparent is not None or traceparent is None or not is_traceparent(traceparent):
        return wanted
    return wanted.model_copy(update={"traceparent": traceparent})


def route_template(scope: Any) -> str:
    """The template of the route that served ``scope``, for metrics; ``unknown`` if none did."""
    route = scope.get("route")
    return route.path if route is not None else "unknown"
