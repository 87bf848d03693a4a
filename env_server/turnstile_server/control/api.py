"""The REST routes of the control API: episodes, their results, the trainer's sampling, the engine, events.

Owns the shapes of requests and answers. Decides nothing: episodes belong to the ``EpisodeService``, the engine to
the ``Engine``, and ``control/errors.py`` turns their typed errors into statuses.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

import anyio
import anyio.to_thread
from fastapi import APIRouter, Query, Request
from pydantic import BaseModel
from starlette.responses import Response

from turnstile.models import (
    AuditReport,
    CompletionRequest,
    EngineInfo,
    EpisodeRequest,
    EpisodeStatus,
    PauseRequest,
    SampleSet,
    TokenForest,
    Turn,
    WeightsRequest,
)
from turnstile.models.wire import MEDIA_TYPE as SAFETENSORS
from turnstile.models.wire import encode_forest, encode_samples, forest_as_json, samples_as_json
from turnstile_server.control.agent_address import AgentAddress
from turnstile_server.control.body import JSON, cursor_position, json_bytes, read_model, while_connected
from turnstile_server.control.events import EventStream
from turnstile_server.control.protocol import EpisodeService
from turnstile_server.control.trainer_sampling import TrainerSampling
from turnstile_server.engines.protocol import Engine
from turnstile_server.observability.metrics import CONTENT_TYPE as METRICS_TYPE
from turnstile_server.observability.metrics import Metrics
from turnstile_server.settings import ControlSettings

MAX_PAGE = 1000
"""Ceiling of ``GET /episodes?limit=``."""


@dataclass(frozen=True, slots=True)
class ControlParts:
    """What the routes are built from. ``workers`` bounds the threads that encode samples and turns. ``closing`` is
    set when the server stops: long polls then answer, and event streams end. ``address``: the agent listener's."""

    episodes: EpisodeService
    training: TrainerSampling
    engine: Engine
    metrics: Metrics
    settings: ControlSettings
    workers: anyio.CapacityLimiter
    closing: anyio.Event
    address: AgentAddress


def build_router(parts: ControlParts) -> APIRouter:
    """All routes of this module."""
    router = APIRouter()
    _add_open_routes(router)
    _add_episode_routes(router, parts)
    _add_result_routes(router, parts)
    _add_training_routes(router, parts)
    _add_engine_routes(router, parts)
    _add_watch_routes(router, parts)
    return router


def _add_open_routes(router: APIRouter) -> None:
    @router.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "healthy"}

    @router.get("/ready")
    async def ready() -> dict[str, str]:
        """Constant: these routes serve once all is started; ``http/starting.py`` answers before."""
        return {"status": "ready"}


def _add_episode_routes(router: APIRouter, parts: ControlParts) -> None:
    episodes, settings = parts.episodes, parts.settings

    @router.post("/episodes", status_code=201)
    async def create(request: Request) -> Response:
        wanted = await read_model(request, EpisodeRequest)
        created, is_new = await episodes.create(wanted, parts.address.of(request.scope))
        return _model(created, 201 if is_new else 200)

    @router.get("/episodes")
    async def page(
        status: EpisodeStatus | None = None,
        group_id: str | None = None,
        cursor: str | None = None,
        limit: Annotated[int, Query(ge=1, le=MAX_PAGE)] = settings.page_size,
    ) -> Response:
        before = cursor_position(cursor)
        return _model(await episodes.page(status=status, group_id=group_id, before=before, limit=limit))

    @router.get("/episodes/{episode_id}")
    async def get(
        request: Request, episode_id: str, wait: Annotated[float, Query(ge=0, allow_inf_nan=False)] = 0.0
    ) -> Response:
        changed = None
        if wait > 0:
            wait_s = min(wait, settings.max_wait_s)
            changed = await while_connected(request, lambda: episodes.get(episode_id, wait_s), parts.closing)
        return _model(changed if changed is not None else await episodes.get(episode_id))

    @router.delete("/episodes/{episode_id}", status_code=204)
    async def delete(episode_id: str) -> Response:
        await episodes.delete(episode_id)
        return Response(status_code=204)

    @router.post("/episodes/{episode_id}/finish")
    async def finish(episode_id: str) -> Response:
        return _model(await episodes.finish(episode_id))

    @router.post("/episodes/{episode_id}/cancel")
    async def cancel(episode_id: str) -> Response:
        return _model(await episodes.cancel(episode_id))


def _add_result_routes(router: APIRouter, parts: ControlParts) -> None:
    episodes = parts.episodes

    async def in_thread(encode: Callable[[], bytes]) -> bytes:
        return await anyio.to_thread.run_sync(encode, limiter=parts.workers)

    @router.get("/episodes/{episode_id}/turns")
    async def turns(episode_id: str) -> Response:
        found = await episodes.turns(episode_id)
        return Response(await in_thread(lambda: _turns_json(list(found))), media_type=JSON)

    @router.get("/episodes/{episode_id}/samples")
    async def samples(request: Request, episode_id: str, include_untrained: bool = False) -> Response:
        found = await episodes.samples(episode_id, include_untrained=include_untrained)
        if _wants_json(request.headers.get("accept", "")):
            return Response(await in_thread(lambda: _samples_json(found)), media_type=JSON)
        return Response(await in_thread(lambda: encode_samples(found)), media_type=SAFETENSORS)

    @router.get("/episodes/{episode_id}/tree")
    async def tree(request: Request, episode_id: str, include_untrained: bool = False) -> Response:
        found = await episodes.tree(episode_id, include_untrained=include_untrained)
        if _wants_json(request.headers.get("accept", "")):
            return Response(await in_thread(lambda: _forest_json(found)), media_type=JSON)
        return Response(await in_thread(lambda: encode_forest(found)), media_type=SAFETENSORS)

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


def _add_engine_routes(router: APIRouter, parts: ControlParts) -> None:
    engine = parts.engine

    async def info() -> Response:
        state, can = await engine.state(), engine.capabilities
        return _model(
            EngineInfo(
                ok=state.ok,
                weight_version=state.weight_version,
                paused=state.paused,
                detail=state.detail,
                model_name=can.model_name,
                context_length=can.context_length,
                vocab_size=can.vocab_size,
            )
        )

    @router.get("/engine")
    async def get_engine() -> Response:
        return await info()

    @router.post("/engine/pause")
    async def pause(request: Request) -> Response:
        await engine.pause((await read_model(request, PauseRequest)).mode)
        return await info()

    @router.post("/engine/resume")
    async def resume() -> Response:
        await engine.resume()
        return await info()

    @router.post("/engine/weights")
    async def weights(request: Request) -> Response:
        wanted = await read_model(request, WeightsRequest)
        await engine.update_weights(wanted.path, wanted.version)
        return await info()


def _add_watch_routes(router: APIRouter, parts: ControlParts) -> None:
    @router.get("/metrics")
    async def metrics() -> Response:
        return Response(parts.metrics.exposition(), media_type=METRICS_TYPE)

    @router.get("/events")
    async def events(request: Request) -> Response:
        await request.body()
        return EventStream(
            parts.episodes.subscribe(),
            closing=parts.closing,
            heartbeat_s=parts.settings.heartbeat_s,
            send_timeout_s=parts.settings.send_timeout_s,
        )


def _model(found: BaseModel, status: int = 200) -> Response:
    return Response(found.model_dump_json(), status, media_type=JSON)


def _turns_json(turns: list[Turn]) -> bytes:
    return b'{"turns":[' + b",".join(turn.model_dump_json().encode() for turn in turns) + b"]}"


def _samples_json(samples: SampleSet) -> bytes:
    return json_bytes(samples_as_json(samples))


def _forest_json(forest: TokenForest) -> bytes:
    return json_bytes(forest_as_json(forest))


def _wants_json(accept: str) -> bool:
    """Whether an Accept header names JSON and not safetensors; wildcards get the default, safetensors."""
    named = {part.split(";")[0].strip().lower() for part in accept.split(",")}
    return JSON in named and SAFETENSORS not in named


def route_template(scope: Any) -> str:
    """The template of the route that served ``scope``, for metrics; ``unknown`` if none did."""
    route = scope.get("route")
    return route.path if route is not None else "unknown"
