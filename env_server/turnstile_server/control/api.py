"""The REST routes of the control API: episodes, their results, the trainer's sampling, events.

Owns the shapes of requests and answers. Decides nothing: episodes belong to the ``EpisodeService``, the engine to
the ``Engine``, and ``control/errors.py`` turns their typed errors into statuses.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import anyio
from fastapi import APIRouter, Path, Query, Request
from pydantic import BaseModel
from starlette.background import BackgroundTask
from starlette.responses import JSONResponse, Response

from turnstile.models import (
    CLIENT_ID_PATTERN,
    AuditReport,
    CompletionRequest,
    Episode,
    EpisodeRequest,
    LeaseTerm,
    NetworkReport,
    RewardUpdate,
    TurnList,
    TurnOutlines,
    explained,
)
from turnstile.models.wire import MEDIA_TYPE as SAFETENSORS
from turnstile.models.wire import forest_parts, sample_parts
from turnstile_server.control.agent_address import AgentAddress
from turnstile_server.control.body import JSON, read_model, while_connected
from turnstile_server.control.events import EventStream
from turnstile_server.control.protocol import EpisodeService, InspectionService
from turnstile_server.control.results import forest_json, outlines_json, parts_response, samples_json, turns_json
from turnstile_server.control.trainer_sampling import TrainerSampling
from turnstile_server.engines.admin import EngineAdmin
from turnstile_server.observability.metrics import CONTENT_TYPE as METRICS_TYPE
from turnstile_server.observability.metrics import Metrics
from turnstile_server.settings import ControlSettings
from turnstile_server.trace_context import is_traceparent


@dataclass(frozen=True, slots=True)
class ControlParts:
    """What the routes are built from. ``workers`` bounds the threads that encode samples and turns. ``closing`` is
    set when the server stops: long polls then answer, and event streams end. ``address``: the agent listener's."""

    episodes: EpisodeService
    inspector: InspectionService
    training: TrainerSampling
    engine: EngineAdmin
    metrics: Metrics
    settings: ControlSettings
    workers: anyio.CapacityLimiter
    closing: anyio.Event
    address: AgentAddress
    pause_alarm_s: float
    """``/ready`` is 503 while model calls have been held for longer."""


def build_router(parts: ControlParts) -> APIRouter:
    """All routes of this module."""
    router = APIRouter()
    _add_open_routes(router, parts)
    _add_episode_routes(router, parts)
    _add_result_routes(router, parts)
    _add_training_routes(router, parts)
    _add_watch_routes(router, parts)
    return router


def _add_open_routes(router: APIRouter, parts: ControlParts) -> None:
    @router.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "healthy"}

    @router.get("/ready")
    async def ready() -> Response:
        """Whether new episodes are taken and their model calls served. These routes serve once all is started;
        ``http/starting.py`` answers before."""
        refusal = parts.episodes.refusal
        if refusal is not None:
            reason = f"new episodes and turns are refused: {refusal}"
            return JSONResponse({"status": "not ready", "reason": reason}, 503)
        unserved = parts.engine.why_none_serves
        if unserved is not None:
            return JSONResponse({"status": "not ready", "reason": unserved}, 503)
        waits_s = parts.engine.held_s
        if waits_s is None:
            return JSONResponse({"status": "ready"})
        held = f"model calls wait: the engine is paused, updated or asleep since {waits_s:.0f} s"
        if waits_s > parts.pause_alarm_s:
            return JSONResponse({"status": "not ready", "reason": held}, 503)
        return JSONResponse({"status": "ready", "engine": held})


def _add_episode_routes(router: APIRouter, parts: ControlParts) -> None:
    episodes, settings = parts.episodes, parts.settings

    @router.post("/episodes", status_code=201)
    async def create(request: Request) -> Response:
        wanted = _traced(await read_model(request, EpisodeRequest), request.headers.get("traceparent"))
        created, is_new = await episodes.create(wanted, parts.address.of(request.scope))
        return _model(created, 201 if is_new else 200)

    @router.get("/episodes/{episode_id}", response_model=Episode)
    async def get(
        request: Request, episode_id: str, wait: Annotated[float, Query(ge=0, allow_inf_nan=False)] = 0.0
    ) -> Response:
        changed = None
        if wait > 0:
            wait_s = min(wait, settings.max_wait_s)
            changed = await while_connected(request, lambda: episodes.get(episode_id, wait_s), parts.closing)
        return _model(explained(changed if changed is not None else await episodes.get(episode_id)))

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

    @router.post("/leases/{lease_id}")
    async def renew_lease(request: Request, lease_id: Annotated[str, Path(pattern=CLIENT_ID_PATTERN)]) -> Response:
        return _model(episodes.renew_lease(lease_id, (await read_model(request, LeaseTerm)).lease_s))


def _add_result_routes(router: APIRouter, parts: ControlParts) -> None:
    episodes = parts.episodes

    async def fetched(episode_id: str) -> BackgroundTask | None:
        """Notes, once the response was sent, that a trainer has the whole of an ended episode: the bounds of the
        disk may delete it then. None for an episode that goes on."""

        async def note() -> None:
            episodes.fetched(episode_id)

        return BackgroundTask(note) if (await episodes.get(episode_id)).status.ended else None

    @router.get("/episodes/{episode_id}/turns", response_model=TurnList | TurnOutlines)
    async def turns(episode_id: str, arrays: bool = True) -> Response:
        """``arrays=false``: counts of tokens in place of tokens, for people to look at; it counts as no fetch."""
        if not arrays:
            outlines = await parts.inspector.outlines(episode_id)
            return await parts_response(outlines_json(outlines), JSON, None, parts.workers)
        sent = await fetched(episode_id)
        found = await episodes.turns(episode_id)
        return await parts_response(turns_json(found), JSON, sent, parts.workers)

    @router.get("/episodes/{episode_id}/samples")
    async def samples(request: Request, episode_id: str, include_untrained: bool = False) -> Response:
        sent = await fetched(episode_id)
        found = await episodes.samples(episode_id, include_untrained=include_untrained)
        if _wants_json(request.headers.get("accept", "")):
            return await parts_response(samples_json(found), JSON, sent, parts.workers)
        return await parts_response(sample_parts(found), SAFETENSORS, sent, parts.workers)

    @router.get("/episodes/{episode_id}/tree")
    async def tree(request: Request, episode_id: str, include_untrained: bool = False) -> Response:
        sent = await fetched(episode_id)
        found = await episodes.tree(episode_id, include_untrained=include_untrained)
        if _wants_json(request.headers.get("accept", "")):
            return await parts_response(forest_json(found), JSON, sent, parts.workers)
        return await parts_response(forest_parts(found), SAFETENSORS, sent, parts.workers)

    @router.get("/episodes/{episode_id}/network", response_model=NetworkReport)
    async def network(episode_id: str) -> Response:
        return _model(await episodes.network(episode_id))

    @router.post("/episodes/{episode_id}/audit", response_model=AuditReport)
    async def audit(request: Request, episode_id: str) -> Response:
        report = await while_connected(request, lambda: episodes.audit(episode_id))
        return _model(report) if report is not None else Response(status_code=204)  # the caller is gone


def _add_training_routes(router: APIRouter, parts: ControlParts) -> None:
    training, settings = parts.training, parts.settings

    @router.get("/episodes/{episode_id}/pending")
    async def pending(
        request: Request, episode_id: str, wait: Annotated[float, Query(ge=0, allow_inf_nan=False)] = 0.0
    ) -> Response:
        found = None
        if wait > 0:
            wait_s = min(wait, settings.max_wait_s)
            found = await while_connected(request, lambda: training.pending(episode_id, wait_s), parts.closing)
        return _model(found if found is not None else await training.pending(episode_id))

    @router.post("/episodes/{episode_id}/completions")
    async def complete(request: Request, episode_id: str) -> Response:
        return _model(await training.complete(episode_id, await read_model(request, CompletionRequest)))


def _add_watch_routes(router: APIRouter, parts: ControlParts) -> None:
    @router.get("/metrics")
    async def metrics() -> Response:
        return Response(parts.metrics.exposition(), media_type=METRICS_TYPE)

    @router.get("/events")
    async def events(request: Request) -> Response:
        await request.body()
        return EventStream(
            parts.episodes.subscribe(request.headers.get("last-event-id")),
            closing=parts.closing,
            heartbeat_s=parts.settings.heartbeat_s,
            send_timeout_s=parts.settings.send_timeout_s,
        )


def _model(found: BaseModel, status: int = 200) -> Response:
    return Response(found.model_dump_json(), status, media_type=JSON)


def _traced(wanted: EpisodeRequest, traceparent: str | None) -> EpisodeRequest:
    """With the header's trace, where the body names none. One that is not W3C's is ignored, as it says."""
    if wanted.traceparent is not None or traceparent is None or not is_traceparent(traceparent):
        return wanted
    return wanted.model_copy(update={"traceparent": traceparent})


def _wants_json(accept: str) -> bool:
    """Whether an Accept header names JSON and not safetensors; wildcards get the default, safetensors."""
    named = {part.split(";")[0].strip().lower() for part in accept.split(",")}
    return JSON in named and SAFETENSORS not in named


def route_template(scope: Any) -> str:
    """The template of the route that served ``scope``, for metrics; ``unknown`` if none did."""
    route = scope.get("route")
    return route.path if route is not None else "unknown"
