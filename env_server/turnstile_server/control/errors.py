"""Errors of the control API: each is ``{"error": {"type", "message", "detail"?}}`` with its status.

What must hold: whatever a handler raises, the caller gets that shape and no internals of the server; an unexpected
exception is logged once, with its traceback, and answered with 500 ``internal_error``.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Match, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from turnstile.models.faults import fault_text
from turnstile_server.errors import (
    BodyTooLarge,
    InvalidRequest,
    MethodNotAllowed,
    NotFound,
    TurnstileError,
    Unauthorized,
    Unprocessable,
)
from turnstile_server.shortages import exhausted_by

logger = logging.getLogger(__name__)

_INTERNAL = TurnstileError("The server failed on this request; its log says why.")

_BY_STATUS: dict[int, type[TurnstileError]] = {
    400: InvalidRequest,
    404: NotFound,
    413: BodyTooLarge,
    422: Unprocessable,
}


def error_response(error: TurnstileError) -> Response:
    """The error as the control API writes it, with ``Retry-After`` in whole seconds if the error has one."""
    body: dict[str, Any] = {"type": error.type, "message": error.message}
    if error.detail is not None:
        body["detail"] = error.detail
    headers = {}
    if error.retry_after_s is not None:
        headers["retry-after"] = str(math.ceil(error.retry_after_s))
    if isinstance(error, Unauthorized):
        headers["www-authenticate"] = 'Bearer realm="turnstile control"'
    if isinstance(error, MethodNotAllowed):
        headers["allow"] = ", ".join(error.allowed)
    return Response(json.dumps({"error": body}, default=str), error.status, headers, media_type="application/json")


def not_allowed(route: str, allowed: Sequence[str]) -> MethodNotAllowed:
    """``route``: the method and the path that were asked for."""
    return MethodNotAllowed(f"{route} is not allowed here; allowed: {', '.join(allowed)}.", allowed)


def unprocessable(errors: Sequence[Mapping[str, Any]]) -> Unprocessable:
    """Pydantic's errors as one: it names each field and the reason, and repeats no value."""
    detail = [
        {"field": ".".join(str(part) for part in error["loc"]), "reason": fault_text(error)} for error in errors
    ]
    message = "; ".join(f"{item['field'] or 'body'}: {item['reason']}" for item in detail)
    return Unprocessable(message, detail=detail)


def install_error_handlers(app: FastAPI, routes: Sequence[BaseRoute]) -> None:
    """Make ``app`` answer every error of its ``routes`` in the control API's shape."""
    app.add_exception_handler(TurnstileError, _turnstile_error)
    app.add_exception_handler(HTTPException, _http_error(routes))
    app.add_exception_handler(RequestValidationError, _validation_error)
    app.add_exception_handler(ClientDisconnect, _disconnected)
    for kind in (OSError, MemoryError, RuntimeError):
        app.add_exception_handler(kind, _shortage)
    app.add_exception_handler(Exception, _unforeseen)


class ErrorBoundary:
    """ASGI middleware, the outermost: answers errors of the other middlewares, unexpected ones with 500."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started = False

        async def watched_send(message: Message) -> None:
            nonlocal started
            started = started or message["type"] == "http.response.start"
            await send(message)

        response: Response | None = None
        try:
            await self._app(scope, receive, watched_send)
        except TurnstileError as error:
            response = error_response(error)
        except Exception as error:
            logger.exception("unhandled error in %s %s", scope["method"], scope["path"])
            response = error_response(exhausted_by(error) or _INTERNAL)
        if response is not None and not started:
            await response(scope, receive, send)


async def _turnstile_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, TurnstileError)
    if error.status >= 500:
        logger.warning("%s %s: %s: %s", request.method, request.url.path, error.type, error.message)
    return error_response(error)


def _http_error(routes: Sequence[BaseRoute]) -> Callable[[Request, Exception], Awaitable[Response]]:
    async def handle(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        route = f"{request.method} {request.url.path}"
        match error.status_code:
            case _ if isinstance(error.__cause__, TurnstileError):
                return error_response(error.__cause__)  # a body that could not be read (``BodyLimit``)
            case 404:
                return error_response(NotFound(f"No such route: {route}."))
            case 405:
                allowed = _methods(request, routes)
                return error_response(not_allowed(route, allowed))
            case status:
                return error_response(_BY_STATUS.get(status, TurnstileError)(str(error.detail)))

    return handle


def _methods(request: Request, routes: Sequence[BaseRoute]) -> list[str]:
    """All methods that are served at the request's path; the framework names those of one route only."""
    found: set[str] = set()
    for route in routes:
        if isinstance(route, Route) and route.matches(request.scope)[0] is not Match.NONE:
            found |= route.methods or set()
    return sorted(found)


async def _validation_error(_request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    return error_response(unprocessable(error.errors()))


async def _disconnected(_request: Request, _error: Exception) -> Response:
    """The caller left while it sent its body, so no answer arrives."""
    return Response(status_code=400)


async def _shortage(request: Request, error: Exception) -> Response:
    """Raises what is no shortage: then it is unforeseen."""
    exhausted = exhausted_by(error)
    if exhausted is None:
        raise error
    return await _turnstile_error(request, exhausted)


async def _unforeseen(_request: Request, _error: Exception) -> Response:
    """Starlette sends this answer and raises the error again; the ErrorBoundary logs it."""
    return error_response(_INTERNAL)
