"""The control door as one ASGI application: routes inside, limits, key and error boundary around them.

Order, from the outside: errors of any layer take the door's shape; then the key; then the body's size; then
the routes. Nothing is read from a caller before it has shown the key.
"""

from __future__ import annotations

from importlib.metadata import version

from fastapi import APIRouter, FastAPI
from starlette.middleware import Middleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from turnstile_server.control.api import route_template
from turnstile_server.control.auth import ControlKey
from turnstile_server.control.body import BodyLimit
from turnstile_server.control.errors import ErrorBoundary, install_error_handlers
from turnstile_server.observability.metrics import Metrics
from turnstile_server.settings import ControlSettings


class CountRequests:
    """ASGI middleware: every answered request counts, under its route's template."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def counting_send(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._metrics.control_request(route_template(scope), message["status"])
            await send(message)

        await self._app(scope, receive, counting_send if scope["type"] == "http" else send)


def build_control_app(
    routers: list[APIRouter], *, key: str | None, metrics: Metrics, settings: ControlSettings
) -> ASGIApp:
    """The application to serve on the control listener. ``key`` None switches authentication off."""
    inner = FastAPI(
        title="Turnstile",
        version=version("turnstile-rl"),
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
    )
    install_error_handlers(inner, [route for router in routers for route in router.routes])
    for router in routers:
        inner.include_router(router)
    layers = [
        Middleware(CountRequests, metrics),
        Middleware(ErrorBoundary),
        Middleware(ControlKey, key),
        Middleware(BodyLimit, settings.max_body_bytes),
    ]
    app: ASGIApp = inner
    for layer in reversed(layers):
        app = layer.cls(app, *layer.args, **layer.kwargs)
    return app
