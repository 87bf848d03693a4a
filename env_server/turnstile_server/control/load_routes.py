"""The routes by which several servers are one fleet: how full this one is, and that it takes no more."""

from __future__ import annotations

from collections.abc import Callable

from fastapi import APIRouter
from starlette.responses import Response

from turnstile.models import ServerLoad
from turnstile_server.control.body import JSON


def build_load_router(load: Callable[[], ServerLoad], drain: Callable[[], None]) -> APIRouter:
    """``drain`` begins to drain the server; it may be repeated."""
    router = APIRouter()

    @router.get("/load", response_model=ServerLoad)
    async def tell() -> Response:
        return Response(load().model_dump_json(), media_type=JSON)

    @router.post("/drain", response_model=ServerLoad)
    async def begin() -> Response:
        """The server takes no new episodes from now on, and ends once those that are open have ended."""
        drain()
        return Response(load().model_dump_json(), media_type=JSON)

    return router
