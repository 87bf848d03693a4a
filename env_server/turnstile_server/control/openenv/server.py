"""The OpenEnv server: what its routes do, over HTTP and over WebSockets. ``loader`` makes it once.

HTTP is not stateless here, unlike in the framework's own server: ``reset`` starts a detached episode, and ``step``
and ``state`` name it by its id.
"""

from __future__ import annotations

from typing import Any

from openenv.core.env_server.types import WSErrorCode
from pydantic import BaseModel, ConfigDict, Field
from starlette.websockets import WebSocket

from turnstile.models.base import MAX_SECONDS
from turnstile_server.control.openenv.environment import TurnstileEnvironment
from turnstile_server.control.openenv.jsonrpc import JsonRpc
from turnstile_server.control.openenv.parts import OpenEnvParts
from turnstile_server.control.openenv.websocket import OpenEnvSocket, SocketLimits, error_frame
from turnstile_server.control.openenv.wire import (
    ResetParameters,
    TurnstileAction,
    TurnstileObservation,
    TurnstileState,
    serialise,
)
from turnstile_server.errors import Unprocessable


class StepRequest(BaseModel):
    """Body of ``POST /step``. ``request_id`` is a field of the framework; no answer repeats it, there as here."""

    model_config = ConfigDict(extra="forbid")

    action: TurnstileAction
    episode_id: str | None = None
    timeout_s: float | None = Field(None, gt=0, le=MAX_SECONDS)
    request_id: str | None = Field(None, max_length=255)


class DetachedEpisodes:
    """Environments of detached episodes by id, so that any later request can continue one.

    An environment whose episode runs is never forgotten (the server bounds how many run). Of ended ones the newest
    ``kept`` stay.
    """

    def __init__(self, kept: int) -> None:
        self._kept = kept
        self._environments: dict[str, TurnstileEnvironment] = {}

    def add(self, environment: TurnstileEnvironment) -> None:
        assert environment.episode_id is not None
        self._environments[environment.episode_id] = environment

    def get(self, episode_id: str) -> TurnstileEnvironment | None:
        return self._environments.get(episode_id)

    async def tidy(self) -> None:
        """Forget the oldest of the ended episodes beyond ``kept``."""
        if len(self._environments) <= self._kept:
            return
        ended = [
            episode_id
            for episode_id, environment in list(self._environments.items())
            if await environment.has_ended()
        ]
        for episode_id in ended[: max(0, len(ended) - self._kept)]:
            self._environments.pop(episode_id, None)

    def __len__(self) -> int:
        return len(self._environments)


class OpenEnvServer:
    """Serves every OpenEnv route, but for ``/metadata``, which needs nothing of the framework."""

    step_request = StepRequest

    def __init__(self, parts: OpenEnvParts) -> None:
        self._parts = parts
        self._detached = DetachedEpisodes(parts.settings.kept)
        self._rpc = JsonRpc(self._find, self._create)
        self._sockets = 0
        self._limits = SocketLimits(
            parts.control.max_body_bytes, parts.settings.max_ahead, parts.control.send_timeout_s
        )

    # HTTP

    async def reset(self, parameters: dict[str, Any]) -> dict[str, Any]:
        """Start a detached episode. Raises what TurnstileEnvironment.reset_async raises.

        A caller that leaves before the answer does not know the episode's id, so that cancels the episode.
        """
        environment = TurnstileEnvironment(self._parts)
        return serialise(await self._reset(environment, parameters))

    async def step(self, request: StepRequest) -> dict[str, Any]:
        if request.episode_id is not None:
            environment = await self._find(request.episode_id)
        elif request.action.type == "list_tools":
            environment = TurnstileEnvironment(self._parts)
        else:
            raise Unprocessable("episode_id: over HTTP every step names its episode, as POST /reset gave it")
        return serialise(await environment.step_async(request.action, request.timeout_s))

    async def state(self, episode_id: str | None) -> dict[str, Any]:
        environment = TurnstileEnvironment(self._parts) if episode_id is None else await self._find(episode_id)
        return (await environment.refreshed()).model_dump(mode="json")

    def schema(self) -> dict[str, Any]:
        return {
            "action": TurnstileAction.model_json_schema(),
            "observation": TurnstileObservation.model_json_schema(),
            "state": TurnstileState.model_json_schema(),
            "reset": ResetParameters.model_json_schema(),
        }

    async def rpc(self, message: Any, episode_id: str | None) -> dict[str, Any] | None:
        """Answer one JSON-RPC message; None for a notification."""
        return await self._rpc.answer(message, TurnstileEnvironment(self._parts), episode_id=episode_id)

    # WebSocket

    async def socket(self, websocket: WebSocket) -> None:
        """Serve an accepted socket to its end."""
        if self._sockets >= self._parts.settings.max_sockets:
            message = f"{self._sockets} sockets are open, the server's limit (openenv.max_sockets)"
            counts = {"active_sessions": self._sockets, "max_sessions": self._parts.settings.max_sockets}
            await websocket.send_text(error_frame(message, WSErrorCode.CAPACITY_REACHED, **counts))
            await websocket.close()
            return
        self._sockets += 1
        try:
            environment = TurnstileEnvironment(self._parts)
            closing = self._parts.closing
            await OpenEnvSocket(websocket, environment, self._rpc, self._limits, closing, self._keep).serve()
        finally:
            self._sockets -= 1

    # Helpers

    async def _find(self, episode_id: str) -> TurnstileEnvironment:
        """The environment of a detached episode. An episode that REST or another socket started gets one without
        its key. Raises NotFound."""
        known = self._detached.get(episode_id)
        if known is not None:
            return known
        environment = TurnstileEnvironment(self._parts)
        await environment.attach(episode_id)
        return environment

    async def _create(self, parameters: dict[str, Any]) -> TurnstileEnvironment:
        environment = TurnstileEnvironment(self._parts)
        await self._reset(environment, parameters)
        return environment

    async def _reset(self, environment: TurnstileEnvironment, parameters: dict[str, Any]) -> TurnstileObservation:
        try:
            observation = await environment.reset_async(**{**parameters, "detached": False})
        except BaseException:
            await environment.release()
            raise
        environment.detach()
        await self._keep(environment)
        return observation

    async def _keep(self, environment: TurnstileEnvironment) -> None:
        self._detached.add(environment)
        await self._detached.tidy()
