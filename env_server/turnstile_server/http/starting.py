"""The application of a listener while the server behind it is still being built: ``/health``, ``/ready``, what
describes the environment, and a wait for all else.

Platforms and OpenEnv's provider wait for ``/health`` and give up after seconds, while an engine may load for
minutes. So ``/health`` answers as soon as the server's code is there, and with it what a client may ask for next
(OpenEnv's validator: ``/schema``). ``/ready`` and ``/load`` are 503 at once and say what is waited for. Every
other request waits for the server, WebSocket handshakes too: a client that connects as soon as ``/health``
answers, as OpenEnv's does, tries only once. Nothing of a waiting request is read, so one that is refused in the
end had no effect.
"""

from __future__ import annotations

import json
import re
from collections.abc import Awaitable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import anyio
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send
from starlette.websockets import WebSocket

from turnstile_server.errors import ServerStarting

RETRY_AFTER_S: Final = 1
"""A refused caller may come back at once: it waits on the server again, not on its own clock."""

_KEY_PREFIX = re.compile(r"^/k/[^/]*")


@dataclass(slots=True)
class StartProgress:
    """The progress of the start. ``waits_for`` completes "the server is starting: it waits for …"."""

    waits_for: str = "its code"

    def wait_for(self, what: str) -> None:
        self.waits_for = what


class StartingApp:
    """An ASGI application that passes requests to another one as soon as that is attached.

    ``wait_s``: how long a request waits; then it is 503 with ``Retry-After``. ``probes``: it answers ``/health``
    and ``/ready`` meanwhile.
    """

    def __init__(self, progress: StartProgress, wait_s: float, *, probes: bool) -> None:
        self._progress = progress
        self._wait_s = wait_s
        self._probes = probes
        self._app: ASGIApp | None = None
        self._descriptions: Mapping[str, Any] | None = None
        self._decided = anyio.Event()
        self._described = anyio.Event()

    def describe(self, descriptions: Mapping[str, Any]) -> None:
        """From now on ``/health`` is healthy, and these paths answer with their JSON."""
        self._descriptions = descriptions
        self._described.set()

    def attach(self, app: ASGIApp) -> None:
        """From now on ``app`` serves, the waiting requests first."""
        self._app = app
        self._decided.set()
        self._described.set()

    def abandon(self) -> None:
        """The start has failed, or the server is stopping: refuse what waits, now. No-op after ``attach``."""
        self._decided.set()
        self._described.set()

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        app = self._app
        return self._when_decided(scope, receive, send) if app is None else app(scope, receive, send)

    async def _when_decided(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._app is None and scope["type"] in ("http", "websocket"):
            probe = None
            with anyio.move_on_after(self._wait_s):
                probe = await self._probe(scope)
                if probe is None:
                    await self._decided.wait()
            if probe is not None:
                await probe(scope, receive, send)
                return
        if self._app is not None:
            await self._app(scope, receive, send)
        else:
            await self._refuse(scope, receive, send)

    async def _probe(self, scope: Scope) -> Response | None:
        """The answer of a path that is served during the start."""
        if not self._probes or scope["type"] != "http" or scope["method"] not in ("GET", "HEAD"):
            return None
        if scope["path"] == "/ready":
            return JSONResponse({"status": "not ready", "reason": self._reason()}, 503, _retry_after())
        path = _KEY_PREFIX.sub("", scope["path"])
        if path == "/load":
            return self._refusal(scope)
        await self._described.wait()
        if self._app is not None or self._descriptions is None:
            return None
        if scope["path"] == "/health":
            return JSONResponse({"status": "healthy"})
        described = self._descriptions.get(path)
        return JSONResponse(described) if described is not None else None

    async def _refuse(self, scope: Scope, receive: Receive, send: Send) -> None:
        response = self._refusal(scope)
        if scope["type"] == "websocket":
            await WebSocket(scope, receive, send).send_denial_response(response)
        else:
            await response(scope, receive, send)

    def _refusal(self, scope: Scope) -> Response:
        error = ServerStarting(f"{self._reason()}. Try again.", retry_after_s=RETRY_AFTER_S)
        # The server's own scope: the access log prints it, and the control key may be in the path.
        scope["path"] = _KEY_PREFIX.sub("", scope["path"]) or "/"
        body = json.dumps({"error": {"type": error.type, "message": error.message}})
        return Response(body, error.status, _retry_after(), media_type="application/json")

    def _reason(self) -> str:
        return f"the server is starting: it waits for {self._progress.waits_for}"


def _retry_after() -> dict[str, str]:
    return {"retry-after": str(RETRY_AFTER_S)}
