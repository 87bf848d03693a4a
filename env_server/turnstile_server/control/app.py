"""The control API as one ASGI application: routes inside; key, limits and error boundary around them.

Order, from the outside: errors of any layer get the API's shape; then the key; then Host and Origin; then the
body's size; then the routes. Nothing is read of a body before the request has shown the key.

A server without a model (``engine.kind = none``) has the standby application instead. Container platforms start
such servers and wait for ``/health``, and OpenEnv's validator asks them what they are; every other answer says
which settings the server lacks.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import version

from fastapi import APIRouter, FastAPI
from starlette.middleware import Middleware
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from turnstile_server.control.api import route_template
from turnstile_server.control.auth import OPEN_PATHS, ControlKey
from turnstile_server.control.body import BodyLimit
from turnstile_server.control.errors import ErrorBoundary, error_response, install_error_handlers
from turnstile_server.control.openenv.standby import build_standby_router
from turnstile_server.errors import EngineUnavailable
from turnstile_server.http.origins import OriginCheck, OriginRules
from turnstile_server.http.stopping import Stopping
from turnstile_server.http.wrong_keys import WrongKeys
from turnstile_server.observability.metrics import Metrics
from turnstile_server.settings import ControlSettings

MISSING = (
    "this server has no model (engine.kind is none). Start it with TURNSTILE_ENGINE__KIND=embedded or sglang "
    "(TURNSTILE_ENGINE__URL says where) and TURNSTILE_MODEL=DIR, a Hugging Face folder that it can read"
)
_METHODS = ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE"]


class CountRequests:
    """ASGI middleware: counts every answered request under the template of its route."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def counting_send(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._metrics.control_request(route_template(scope), message["status"])
            await send(message)

        await self._app(scope, receive, counting_send if scope["type"] == "http" else send)


class Interruptible:
    """ASGI middleware: at the end of a shutdown's grace the requests still in progress end with ServerStopping."""

    def __init__(self, app: ASGIApp, stopping: Stopping) -> None:
        self._app = app
        self._stopping = stopping

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":  # WebSockets are closed at the beginning of a shutdown
            await self._app(scope, receive, send)
            return
        with self._stopping.interruptible():
            await self._app(scope, receive, send)


def build_control_app(
    routers: list[APIRouter],
    *,
    key: str | None,
    metrics: Metrics,
    settings: ControlSettings,
    stopping: Stopping | None = None,
    described: bool = True,
    wrong_keys: WrongKeys | None = None,
) -> ASGIApp:
    """The application for the control listener. ``key`` None switches authentication off. ``described``: it has
    ``/openapi.json``. ``wrong_keys`` None: its own, told in the log alone."""
    inner = FastAPI(
        title="Turnstile",
        version=version("turnstile-rl"),
        docs_url=None,
        redoc_url=None,
        openapi_url="/openapi.json" if described else None,
        redirect_slashes=False,
    )
    install_error_handlers(inner, [route for router in routers for route in router.routes])
    for router in routers:
        inner.include_router(router)
    layers = [
        Middleware(CountRequests, metrics),
        Middleware(ErrorBoundary),
        Middleware(Interruptible, stopping or Stopping()),
        Middleware(ControlKey, key, wrong_keys or WrongKeys(metrics.wrong_key)),
        Middleware(OriginCheck, *_origin_check(settings, key)),
        Middleware(BodyLimit, settings),
    ]
    app: ASGIApp = inner
    for layer in reversed(layers):
        app = layer.cls(app, *layer.args, **layer.kwargs)
    return app


def _origin_check(settings: ControlSettings, key: str | None) -> tuple[OriginRules, Callable[[Scope], bool]]:
    """Which requests are checked for Host and Origin, and how.

    With a key: MCP's endpoint, whose specification asks for it, and WebSockets, which browsers let a page of any
    site open; everything else needs the key, which no strange page has. Without one the check is all that keeps
    web pages out, so it covers everything but the probes, and knows no name that nobody named.
    """
    if key is None:
        return OriginRules.of("control", settings, named_only=True), lambda scope: scope["path"] not in OPEN_PATHS
    return OriginRules.of("control", settings), _is_mcp_or_socket


def _is_mcp_or_socket(scope: Scope) -> bool:
    return scope["type"] == "websocket" or bool(scope["path"].rstrip("/") == "/mcp")


def build_standby_app(
    *, key: str | None, metrics: Metrics, settings: ControlSettings, production: bool = False
) -> ASGIApp:
    """The control API of a server without a model: ``/health`` and what describes the server answer, everything
    else says what is missing. ``production``: OpenEnv's mode."""
    router = APIRouter()

    @router.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "healthy"}

    @router.get("/ready")
    async def ready() -> Response:
        return JSONResponse({"status": "not ready", "reason": MISSING}, 503)

    rest = APIRouter()

    @rest.api_route("/{path:path}", methods=_METHODS, include_in_schema=False)
    async def anything_else(path: str) -> Response:
        raise EngineUnavailable(MISSING)

    openenv = build_standby_router(MISSING, production=production)
    return build_control_app([router, openenv, rest], key=key, metrics=metrics, settings=settings)


async def standby_gate(scope: Scope, receive: Receive, send: Send) -> None:
    """The agent listener of a server without a model: every request is 503."""
    if scope["type"] == "http":
        await error_response(EngineUnavailable(MISSING))(scope, receive, send)
