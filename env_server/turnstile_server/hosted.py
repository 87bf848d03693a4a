"""The server as one ASGI application, for a host of its own choosing: ``uvicorn server.app:app``.

OpenEnv's tools start a server this way; ``turnstile serve`` is the usual way. The application is the control API.
The agent listener is opened beside it at the host's start. Settings come from the environment (``TURNSTILE_*``),
without those of the control listener, which the host owns. One worker: a data directory has one server.
"""

from __future__ import annotations

import logging
from contextlib import AsyncExitStack

import anyio
from starlette.types import ASGIApp, Receive, Scope, Send

from turnstile_server.app import open_apps
from turnstile_server.errors import StartupError
from turnstile_server.http.connections import ConnectionLimits
from turnstile_server.http.descriptors import raise_descriptor_limit
from turnstile_server.http.listeners import Listener, bind, url_of
from turnstile_server.model_files import model_folder
from turnstile_server.settings import Settings, load_settings

_LOG = logging.getLogger(__name__)
_ANY_ADDRESS = "0.0.0.0"


class HostedServer:
    """One server per process. The host must run ASGI's lifespan, which starts and stops everything."""

    def __init__(self) -> None:
        self._control: ASGIApp | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._live(receive, send)
        elif self._control is None:
            raise RuntimeError("the server was not started: its host must run the ASGI lifespan")
        else:
            await self._control(scope, receive, send)

    async def _live(self, receive: Receive, send: Send) -> None:
        await receive()
        try:
            async with AsyncExitStack() as stack:
                await self._start(stack)
                await send({"type": "lifespan.startup.complete"})
                await receive()
                self._control = None
        except StartupError as error:
            await send({"type": "lifespan.startup.failed", "message": error.message})
            return
        await send({"type": "lifespan.shutdown.complete"})

    async def _start(self, stack: AsyncExitStack) -> None:
        settings = hosted_settings(load_settings({}))
        bound = bind("agent", settings.gate.host, settings.gate.port)
        stack.callback(bound.close)
        apps = await open_apps(settings, model_folder(settings), url_of(bound), stack)
        idle_s, grace_s = settings.gate.idle_connection_s, settings.shutdown_grace_s
        agent = Listener(
            apps.agent,
            bound,
            idle_s=idle_s,
            grace_s=grace_s,
            access_log=False,
            limits=ConnectionLimits.of(settings.gate, raise_descriptor_limit(settings).agents),
            name="the agent listener",
            websockets=False,
        )
        agent.last_words = apps.stopping.cut
        serving = await stack.enter_async_context(anyio.create_task_group())
        serving.start_soon(agent.serve)
        stack.callback(agent.stop)
        stack.callback(apps.closing.set)
        self._control = apps.control
        _LOG.info("agent listener: %s", url_of(bound))


def hosted_settings(settings: Settings) -> Settings:
    """Does not take the control listener's own address for the host's, which is not known here.

    With a control key every Host is served unless the settings name some. Without one, addresses and names that no
    stranger can have, as on a public listener: a page that had its name resolve to this server would need no key.
    """
    if settings.control.allowed_hosts is not None:
        return settings
    update = {"allowed_hosts": ("*",)} if settings.control.auth else {"host": _ANY_ADDRESS}
    return settings.model_copy(update={"control": settings.control.model_copy(update=update)})


app = HostedServer()
