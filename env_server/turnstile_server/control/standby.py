"""What a server without a model answers (``engine.kind = none``): that it is up, and what it lacks.

For containers: providers of environments start one, wait for ``/health``, and are told by everything else which
settings give it a model. Keeps no state and writes nothing.
"""

from __future__ import annotations

from fastapi import APIRouter
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from turnstile_server.control.app import build_control_app
from turnstile_server.control.errors import error_response
from turnstile_server.errors import EngineUnavailable
from turnstile_server.observability.metrics import Metrics
from turnstile_server.settings import ControlSettings

MISSING = (
    "this server has no model (engine.kind is none). Start it with TURNSTILE_ENGINE__KIND=embedded or sglang "
    "(TURNSTILE_ENGINE__URL says where) and TURNSTILE_MODEL=DIR, a Hugging Face folder that it can read"
)
_METHODS = ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE"]


def build_standby_app(*, key: str | None, metrics: Metrics, settings: ControlSettings) -> ASGIApp:
    """The control door without episodes."""
    router = APIRouter()

    @router.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "healthy"}

    @router.get("/ready")
    async def ready() -> Response:
        return JSONResponse({"status": "not ready", "reason": MISSING}, 503)

    @router.api_route("/{path:path}", methods=_METHODS, include_in_schema=False)
    async def anything_else(path: str) -> Response:
        raise EngineUnavailable(MISSING)

    return build_control_app([router], key=key, metrics=metrics, settings=settings)


async def standby_gate(scope: Scope, receive: Receive, send: Send) -> None:
    """The agent door without a model."""
    if scope["type"] == "http":
        await error_response(EngineUnavailable(MISSING))(scope, receive, send)
