"""The OpenEnv server: what its routes do, over HTTP and over WebSockets.

HTTP is not stateless here, unlike in the framework's own server: ``reset`` starts a detached episode, and ``step``
and ``state`` name it by its id.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ConfigDict, Field
from starlette.types import Scope
from starlette.websockets import WebSocket

from turnstile.models.base import MAX_SECONDS
from turnstile_server.control.openenv.environment import TurnstileEnvironment
from turnstile_server.control.openenv.frames import FrameProtocol
from turnstile_server.control.openenv.jsonrpc import JsonRpc, RpcProtocol, RpcSession
from turnstile_server.control.openenv.mcp_sessions import McpSessions
from turnstile_server.control.openenv.openenv_parts import OpenEnvBounds, OpenEnvParts
from turnstile_server.control.openenv.openenv_types import (
    TurnstileAction,
    TurnstileObservation,
    serialise,
)
from turnstile_server.control.openenv.socket import BoundedSocket, MessageT, SocketLimits, SocketProtocol
from turnstile_server.control.openenv.task_choice import TaskChoice, TaskOrder
from turnstile_server.errors import Conflict, NotFound, QueueFull, Unprocessable
from turnstile_server.http.bounds import ListenerBounds


class StepRequest(BaseModel):
    """Body of ``POST /step``. ``request_id`` is a field of the framework; no answer repeats it, there as here."""

    model_config = ConfigDict(extra="forbid")

    action: TurnstileAction
    episode_id: str | None = None
    timeout_s: float | None = Field(None, gt=0, le=MAX_SECONDS)
    request_id: str | None = Field(None, max_length=255)


@dataclass(frozen=True, slots=True)
class RpcAnswer:
    """``body`` is None for a notification. ``session_id``: of the session that the message opened."""

    body: dict[str, Any] | None
    session_id: str | None = None


class DetachedEpisodes:
    """Environments of detached episodes by id, so that any later request can continue one.

    An environment whose episode runs is never forgotten (the server bounds how many run). Of ended ones the newest
    ``kept`` stay.
    """

    def __init__(self, kept: int) -> None:
        self._kept = kept
        self._environments: dict[str, TurnstileEnvironment] = {}

    def add(self, environment: TurnstileEnvironment, name: str | None = None) -> None:
        """``name``: of a session that has no episode yet."""
        name = name or environment.episode_id
        assert name is not None
        self._environments[name] = environment

    async def sessions(self) -> int:
        """The sessions with a socket or an episode that runs."""
        shared = {found for found in self._environments.values() if found.session is not None}
        return len([found for found in shared if in_use(found) or not await found.has_ended()])

    def get(self, episode_id: str) -> TurnstileEnvironment | None:
        return self._environments.get(episode_id)

    async def tidy(self) -> None:
        """Forget the oldest of the ended episodes beyond ``kept``."""
        if len(self._environments) <= self._kept:
            return
        ended = [
            episode_id
            for episode_id, environment in list(self._environments.items())
            if not in_use(environment) and await environment.has_ended()
        ]
        for episode_id in ended[: max(0, len(ended) - self._kept)]:
            self._environments.pop(episode_id, None)

    def __len__(self) -> int:
        return len(self._environments)


def in_use(environment: TurnstileEnvironment) -> bool:
    """True where a socket plays in its session."""
    return environment.session is not None and environment.session.attached


class OpenEnvServer:
    """Serves every OpenEnv route but ``/metadata`` and ``/schema``."""

    def __init__(self, parts: OpenEnvParts) -> None:
        self._parts = parts
        self._production = parts.settings.mode == "production"
        self._order = TaskOrder(parts.tasks)
        self._detached = DetachedEpisodes(parts.settings.bounds_of(OpenEnvBounds).kept)
        self._sessions = McpSessions(parts.settings.max_sessions)
        self._rpc = JsonRpc(self._find)
        self._sockets = 0
        self._limits = SocketLimits(
            parts.control.max_body_bytes,
            parts.control.max_body_values,
            parts.settings.bounds_of(OpenEnvBounds).max_ahead,
            parts.control.bounds_of(ListenerBounds).send_timeout_s,
        )

    # HTTP

    async def reset(self, parameters: dict[str, Any], scope: Scope) -> dict[str, Any]:
        """Start a detached episode. Raises what TurnstileEnvironment.reset raises.

        A caller that leaves before the answer does not know the episode's id, so that cancels the episode.
        """
        return serialise(await self._reset(self._environment(scope), parameters))

    async def step(self, request: StepRequest) -> dict[str, Any]:
        if request.episode_id is not None:
            environment = await self._find(request.episode_id)
        elif request.action.type == "list_tools":
            environment = self._environment()
        else:
            raise Unprocessable("episode_id: over HTTP every step names its episode, as POST /reset gave it")
        return serialise(await environment.step(request.action, request.timeout_s))

    async def state(self, episode_id: str | None) -> dict[str, Any]:
        environment = self._environment() if episode_id is None else await self._find(episode_id)
        return (await environment.refreshed()).model_dump(mode="json")

    async def rpc(self, message: Any, episode_id: str | None, session_id: str | None, scope: Scope) -> RpcAnswer:
        """Answer one JSON-RPC message. Raises NotFound for a ``session_id`` (the header) that there is not."""
        opened = None
        if session_id is not None:
            environment = self._sessions.get(session_id)
        else:
            environment = self._environment(scope)
            if episode_id is None and isinstance(message, dict) and message.get("method") == "initialize":
                opened = await self._sessions.open(environment)

        async def create(parameters: dict[str, Any]) -> str | None:
            created = self._environment(scope)
            name: str | None = await self._open_session(created)
            if any(value is not None for value in parameters.values()):
                await self._begin(created, parameters)
                name = created.episode_id
            await self._keep(created, name)
            return name

        async def begin() -> None:
            await environment.begin(detached=True)
            await self._keep(environment)

        session = RpcSession(environment, create, begin if session_id is not None else None, episode_id)
        return RpcAnswer(await self._rpc.answer(message, session), opened)

    async def close_session(self, session_id: str) -> None:
        """End the session of a standard MCP client. Raises NotFound."""
        await self._sessions.close(session_id)

    # WebSocket

    async def ws(self, websocket: WebSocket) -> None:
        """Serve an accepted ``/ws`` socket to its end. ``?session_id=`` is a session of
        ``openenv/session/create``, which outlives the socket. Raises NotFound, and Conflict where the session has
        a socket or has ended."""
        name = websocket.query_params.get("session_id")
        environment = self._environment(websocket.scope) if name is None else self._shared(name)
        session = self._socket_session(environment)
        frames = FrameProtocol(self._rpc, session, self._limits, self._keep, production=self._production)
        socket = environment.session
        if socket is None:
            await self._serve(websocket, frames, environment.release)
            return

        async def leave() -> None:
            if socket.closing and environment.episode_id is not None:
                await environment.close_session()

        socket.attached = True
        try:
            await self._serve(websocket, frames, leave)
        finally:
            socket.attached = False

    def _shared(self, name: str) -> TurnstileEnvironment:
        found = self._detached.get(name)
        if found is None or found.session is None:
            raise NotFound(f"there is no session {name!r}: POST /mcp openenv/session/create opens one")
        if found.session.attached:
            raise Conflict(f"the session {name!r} has a socket already")
        if found.session.closing:
            raise Conflict(f"the session {name!r} was closed: POST /mcp openenv/session/create opens another")
        return found

    async def mcp_socket(self, websocket: WebSocket) -> None:
        """Serve an accepted ``/mcp`` socket to its end: JSON-RPC, one message per frame."""
        environment = self._environment(websocket.scope)
        protocol = RpcProtocol(self._rpc, self._socket_session(environment), self._limits)
        await self._serve(websocket, protocol, environment.release)

    def _socket_session(self, environment: TurnstileEnvironment) -> RpcSession:
        """The session of a socket that plays in ``environment``."""

        async def create(parameters: dict[str, Any]) -> str | None:
            await environment.reset(parameters)
            if not environment.owned:
                await self._keep(environment)
            return environment.episode_id

        return RpcSession(environment, create, environment.begin)

    async def _serve(
        self, websocket: WebSocket, protocol: SocketProtocol[MessageT], release: Callable[[], Awaitable[None]]
    ) -> None:
        most = self._parts.settings.max_sockets
        if self._sockets >= most:
            message = f"{self._sockets} sockets are open, the server's limit (openenv.max_sockets)"
            await websocket.send_text(protocol.full(message, self._sockets, most))
            await websocket.close()
            return
        self._sockets += 1
        try:
            await BoundedSocket(websocket, protocol, self._limits, self._parts.closing, release).serve()
        finally:
            self._sockets -= 1

    # Helpers

    def _environment(self, scope: Scope | None = None) -> TurnstileEnvironment:
        """One without an episode. ``scope``: of the request that starts one."""
        address = self._parts.address
        agent_url = address.of(scope) if scope is not None else address.default
        return TurnstileEnvironment(self._parts, TaskChoice(self._order), agent_url)

    async def _find(self, episode_id: str) -> TurnstileEnvironment:
        """The environment of a detached episode. An episode that REST or another socket started gets one without
        its key. Raises NotFound."""
        known = self._detached.get(episode_id)
        if known is not None:
            return known
        environment = self._environment()
        await environment.attach(episode_id)
        return environment

    async def _reset(self, environment: TurnstileEnvironment, parameters: dict[str, Any]) -> TurnstileObservation:
        observation = await self._begin(environment, parameters)
        environment.detach()
        await self._keep(environment)
        return observation

    async def _begin(self, environment: TurnstileEnvironment, parameters: dict[str, Any]) -> TurnstileObservation:
        try:
            return await environment.reset({**parameters, "detached": False})
        except BaseException:
            await environment.release()
            raise

    async def _open_session(self, environment: TurnstileEnvironment) -> str:
        """Raises QueueFull where ``openenv.max_sessions`` sessions have a socket or a running episode."""
        most = self._parts.settings.max_sessions
        if len(self._detached) >= most and await self._detached.sessions() >= most:
            raise QueueFull(
                f"{most} sessions play an episode, the server's limit (openenv.max_sessions)", retry_after_s=5.0
            )
        return environment.open_session()

    async def _keep(self, environment: TurnstileEnvironment, name: str | None = None) -> None:
        self._detached.add(environment, name)
        await self._detached.tidy()
