"""The routes of snapshots and forks."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from turnstile.models import ForkRequest, ForksCreated, SnapshotInfo, SnapshotList
from turnstile_server.control.agent_address import AgentAddress
from turnstile_server.control.body import JSON, read_model
from turnstile_server.control.protocol import ForkService


def build_fork_router(forks: ForkService, address: AgentAddress) -> APIRouter:
    """All routes of this module."""
    router = APIRouter()

    @router.post("/episodes/{episode_id}/snapshot", status_code=201, response_model=SnapshotInfo)
    async def snapshot(episode_id: str) -> Response:
        made = await forks.snapshot(episode_id)
        return Response(made.model_dump_json(), 201, media_type=JSON)

    @router.get("/episodes/{episode_id}/snapshots", response_model=SnapshotList)
    async def snapshots(episode_id: str) -> Response:
        return Response((await forks.snapshots(episode_id)).model_dump_json(), media_type=JSON)

    @router.post("/episodes/{episode_id}/fork", status_code=201, response_model=ForksCreated)
    async def fork(request: Request, episode_id: str) -> Response:
        wanted = await read_model(request, ForkRequest)
        made = await forks.fork(episode_id, wanted, address.of(request.scope))
        return Response(made.model_dump_json(), 201, media_type=JSON)

    return router
