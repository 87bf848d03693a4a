"""The routes of the engine: its state, pauses, new weights, groups, adapters, sleep and workers.

Owns the shapes of requests and answers. Each route answers with the engine's state after it (``EngineInfo``); its
errors are typed, and one that changed nothing says so.
"""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from turnstile.models import (
    AdapterRequest,
    EngineInfo,
    PauseRequest,
    WeightBucketRequest,
    WeightGroupRequest,
    WeightsRequest,
    WeightUpdateBegin,
    WorkerRequest,
)
from turnstile_server.control.body import JSON, read_model
from turnstile_server.engines.admin import EngineAdmin
from turnstile_server.engines.protocol import EngineCapabilities
from turnstile_server.engines.weights import BroadcastBucket, IpcBucket, TensorBucket, WeightBucket, WeightGroup
from turnstile_server.errors import Unprocessable


def build_engine_router(engine: EngineAdmin, can: EngineCapabilities) -> APIRouter:
    """All routes below ``/engine``."""
    router = APIRouter()
    routes = _EngineRoutes(engine, can)
    _add_pause_routes(router, routes)
    _add_weight_routes(router, routes)
    _add_worker_routes(router, routes)
    return router


class _EngineRoutes:
    def __init__(self, engine: EngineAdmin, can: EngineCapabilities) -> None:
        self.engine = engine
        self._can = can

    async def info(self) -> Response:
        state, can = await self.engine.state(), self._can
        info = EngineInfo(
            ok=state.ok,
            weight_version=state.weight_version,
            paused=state.paused,
            detail=state.detail,
            paused_s=state.paused_s,
            asleep=state.asleep,
            running_calls=state.running_calls,
            waiting_calls=state.waiting_calls,
            versions=state.versions,
            workers=state.workers,
            model_name=can.model_name,
            context_length=can.context_length,
            vocab_size=can.vocab_size,
            updates=tuple(sorted(can.updates)),
            tensor_format=can.tensor_format,
            tensor_copies=can.tensor_copies,
            sleeps=can.sleeps,
            upstream=can.upstream is not None,
        )
        return Response(info.model_dump_json(), 200, media_type=JSON)


def _add_pause_routes(router: APIRouter, routes: _EngineRoutes) -> None:
    engine = routes.engine

    @router.get("/engine", response_model=EngineInfo)
    async def get_engine() -> Response:
        return await routes.info()

    @router.post("/engine/pause")
    async def pause(request: Request) -> Response:
        await engine.pause((await read_model(request, PauseRequest)).mode)
        return await routes.info()

    @router.post("/engine/resume")
    async def resume() -> Response:
        await engine.resume()
        return await routes.info()

    @router.post("/engine/sleep")
    async def sleep() -> Response:
        await engine.sleep()
        return await routes.info()

    @router.post("/engine/wake")
    async def wake() -> Response:
        await engine.wake()
        return await routes.info()


def _add_weight_routes(router: APIRouter, routes: _EngineRoutes) -> None:
    engine = routes.engine

    @router.post("/engine/weights")
    async def weights(request: Request) -> Response:
        wanted = await read_model(request, WeightsRequest)
        await engine.load_weights(wanted.path, wanted.version, wanted.mode)
        return await routes.info()

    @router.post("/engine/weights/begin")
    async def begin(request: Request) -> Response:
        wanted = await read_model(request, WeightUpdateBegin)
        await engine.begin_weights(wanted.way, wanted.version, wanted.mode)
        return await routes.info()

    @router.post("/engine/weights/bucket")
    async def bucket(request: Request) -> Response:
        await engine.load_piece(_bucket_of(await read_model(request, WeightBucketRequest)))
        return await routes.info()

    @router.post("/engine/weights/end")
    async def end() -> Response:
        await engine.end_weights()
        return await routes.info()

    @router.post("/engine/weights/cancel")
    async def cancel() -> Response:
        await engine.cancel_weights()
        return await routes.info()

    @router.post("/engine/groups")
    async def join(request: Request) -> Response:
        wanted = await read_model(request, WeightGroupRequest)
        group = WeightGroup(
            wanted.name, wanted.address, wanted.port, wanted.world_size, wanted.rank_offset, wanted.backend
        )
        await engine.join_workers(group, wanted.ranks_per_worker, wanted.ranks)
        return await routes.info()

    @router.delete("/engine/groups/{name}")
    async def leave(name: str) -> Response:
        await engine.leave_workers(name)
        return await routes.info()

    @router.post("/engine/adapters")
    async def load_adapter(request: Request) -> Response:
        wanted = await read_model(request, AdapterRequest)
        await engine.load_adapter(wanted.name, wanted.path)
        return await routes.info()

    @router.delete("/engine/adapters/{name}")
    async def unload_adapter(name: str) -> Response:
        await engine.unload_adapter(name)
        return await routes.info()


def _add_worker_routes(router: APIRouter, routes: _EngineRoutes) -> None:
    engine = routes.engine

    @router.post("/engine/workers")
    async def add_worker(request: Request) -> Response:
        await engine.add_worker((await read_model(request, WorkerRequest)).url)
        return await routes.info()

    @router.delete("/engine/workers/{worker_id}")
    async def remove_worker(worker_id: str) -> Response:
        await engine.remove_worker(worker_id)
        return await routes.info()


def _bucket_of(wanted: WeightBucketRequest) -> WeightBucket:
    """Raises Unprocessable for a piece that is of no way, or of several. An empty field is as good as none:
    clients write the fields that they leave empty, too."""
    parts = {"serialized": wanted.serialized, "names": wanted.names, "handles": wanted.handles}
    given = [name for name, part in parts.items() if part]
    if len(given) != 1:
        raise Unprocessable(
            "a piece of weights has one of: serialized (tensors), names (distributed), handles (ipc)"
        )
    if given == ["serialized"]:
        return TensorBucket(wanted.serialized, wanted.load_format)
    if given == ["handles"]:
        return IpcBucket(wanted.handles)
    if wanted.group is None:
        raise Unprocessable("group: names the process group in which the tensors are broadcast")
    if not len(wanted.names) == len(wanted.dtypes) == len(wanted.shapes) > 0:
        counts = f"{len(wanted.names)}, {len(wanted.dtypes)} and {len(wanted.shapes)}"
        raise Unprocessable(f"names, dtypes and shapes: there must be as many of each, not {counts}")
    return BroadcastBucket(wanted.names, wanted.dtypes, wanted.shapes, wanted.group)
