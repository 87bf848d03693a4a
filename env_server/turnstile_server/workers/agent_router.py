"""One port for the agents of all workers: passes each request to the worker that has the episode of its path.

It costs each model call a hop, so it is there only where one port has to do (``workers.one_agent_port``). Bodies
and answers pass as they come, streams event by event. The worker answers a wrong key. What must hold: a request
with its episode's key keeps its place among the connections, whatever comes without one.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping, Sequence
from contextlib import ExitStack

import aiohttp
import anyio
import anyio.abc
from starlette.types import Receive, Scope, Send
from yarl import URL

from turnstile_server.control.errors import error_response
from turnstile_server.episodes.keys import EpisodeKeys
from turnstile_server.errors import NotFound, TurnstileError, Unauthorized
from turnstile_server.http.connections import ConnectionLimits, admit
from turnstile_server.http.descriptors import connection_shares
from turnstile_server.http.exchange import episode_key, first_headers
from turnstile_server.http.listeners import Listener, bind, url_of
from turnstile_server.http.stopping import Stopping
from turnstile_server.settings import Settings
from turnstile_server.workers.crew import Crew
from turnstile_server.workers.forward import ForwardedResponse
from turnstile_server.workers.link import WorkerLink

_EPISODE = re.compile(r"/e/([A-Za-z0-9_-]{1,64})(/.*)?")


class AgentLink(WorkerLink):
    """Requests of agents to one worker, over its own agent listener."""

    def __init__(self, link: WorkerLink, url: str, settings: Settings) -> None:
        super().__init__(link.child, link.path, None, settings.workers)
        self._url = url

    @property
    def session(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = self.made_session(aiohttp.TCPConnector(limit=0))
        return self._session

    def url_of(self, target: str) -> URL:
        return URL(f"{self._url}{target}", encoded=True)


class AgentRouter:
    """An ASGI application behind a listener of its own. ``workers``: the addresses of their agent listeners, by
    number. ``keys``: of their episodes, by number."""

    def __init__(self, settings: Settings, sockets: ExitStack) -> None:
        """Binds ``gate.port``. Raises StartupError."""
        bound = bind("agent", settings.gate.host, settings.gate.port)
        sockets.callback(bound.close)
        self.url = url_of(bound)
        self.workers: Sequence[str] = ()
        self.keys: Sequence[EpisodeKeys] = ()
        self._links: dict[int, AgentLink] = {}
        self._crew: Crew | None = None
        self._listener = Listener(
            self,
            bound,
            idle_s=settings.gate.idle_connection_s,
            grace_s=settings.shutdown_grace_s,
            access_log=False,
            limits=ConnectionLimits.of(settings.gate, connection_shares(settings).agents),
            name="the agent listener",
            websockets=False,
        )

    async def serve(self, crew: Crew, settings: Settings, tasks: anyio.abc.TaskGroup, stopping: Stopping) -> None:
        """Serves in ``tasks`` until ``close``."""
        self._crew = crew
        self._links = {link.number: AgentLink(link, self.workers[link.number], settings) for link in crew.workers}
        self._listener.last_words = stopping.cut

        async def serve() -> None:
            with anyio.CancelScope(shield=True):  # it ends by ``close``
                await self._listener.serve()

        tasks.start_soon(serve)

    async def close(self) -> None:
        self._listener.stop()
        for link in self._links.values():
            await link.close()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        try:
            link = await self._link(scope)
            await ForwardedResponse(link, trust_forwarded=False, headers=_as_given(scope))(scope, receive, send)
        except TurnstileError as error:
            await error_response(error)(scope, receive, send)

    async def _link(self, scope: Scope) -> AgentLink:
        assert self._crew is not None
        found = _EPISODE.fullmatch(scope["path"])
        if found is None:
            raise NotFound(f"{scope['path'][:200]} is not below /e/EPISODE/")
        owner = await self._crew.owner(found[1])
        if owner is None or owner.number not in self._links:
            raise NotFound(f"there is no episode {found[1]} that runs")
        self._admit(scope, owner.number, found[1])
        return self._links[owner.number]

    def _admit(self, scope: Scope, number: int, episode_id: str) -> None:
        """Notes that a request has shown its episode's key, if it has."""
        with contextlib.suppress(Unauthorized):
            key = episode_key(first_headers(scope))
            if self.keys[number].nonce(episode_id, key) is not None:
                admit(scope)


def _as_given(scope: Scope) -> Mapping[str, str]:
    """The episode's key is the worker's to check."""
    return {
        name.decode("latin-1"): value.decode("latin-1")
        for name, value in scope["headers"]
        if name == b"authorization"
    }
