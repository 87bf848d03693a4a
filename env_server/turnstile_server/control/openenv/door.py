"""Everything of OpenEnv that needs ``openenv-core``, behind one object that ``loader`` makes once.

HTTP here is not stateless, as it is in the framework: ``reset`` starts a detached episode, and ``step`` and
``state`` name it.
"""

from __future__ import annotations

from typing import Any

from openenv.core.env_server.types import WSErrorCode
from pydantic import BaseModel, ConfigDict, Field
from starlette.websockets import WebSocket

from turnstile.models.base import MAX_SECONDS
from turnstile_server.control.openenv.environment import TurnstileEnvironment
from turnstile_server.control.openenv.frames import error_frame
from turnstile_server.control.openenv.jsonrpc import Rpc
from turnstile_server.control.openenv.parts import OpenEnvParts
from turnstile_server.control.openenv.registry import Registry
from turnstile_server.control.openenv.socket import Socket, SocketLimits
from turnstile_server.control.openenv.wire import (
    ResetParameters,
    TurnstileAction,
    TurnstileObservation,
    TurnstileState,
    serialise,
)
from turnstile_server.errors import Unprocessable


class StepRequest(BaseModel):
    """Body of ``POST /step``. ``request_id`` is the framework's; it comes back in nothing, there as here."""

    model_config = ConfigDict(extra="forbid")

    action: TurnstileAction
    episode_id: str | None = None
    timeout_s: float | None = Field(None, gt=0, le=MAX_SECONDS)
    request_id: str | None = Field(None, max_length=255)


class OpenEnvDoor:
    step_request = StepRequest

    def __init__(self, parts: OpenEnvParts) -> None:
        self._parts = parts
        self._registry = Registry(parts.settings.kept)
        self._rpc = Rpc(self._find, self._create)
        self._sockets = 0
        self._limits = SocketLimits(
            parts.control.max_body_bytes, parts.settings.max_ahead, parts.control.send_timeout_s
        )

    # HTTP

    async def reset(self, parameters: dict[str, Any]) -> dict[str, Any]:
        """Raises what TurnstileEnvironment.reset_async raises. A caller that leaves before the answer cancels the
        episode: nobody else knows of it."""
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
        """The answer to one JSON-RPC message; None to a notification."""
        return await self._rpc.answer(message, TurnstileEnvironment(self._parts), episode_id=episode_id)

    # WebSocket

    async def socket(self, websocket: WebSocket) -> None:
        """Serves an accepted socket to its end."""
        if self._sockets >= self._parts.settings.max_sockets:
            most = self._parts.settings.max_sockets
            said = f"{self._sockets} sockets are open, the server's limit (openenv.max_sockets)"
            full = {"active_sessions": self._sockets, "max_sessions": most}
            await websocket.send_text(error_frame(said, WSErrorCode.CAPACITY_REACHED, **full))
            await websocket.close()
            return
        self._sockets += 1
        try:
            environment = TurnstileEnvironment(self._parts)
            closing = self._parts.closing
            await Socket(websocket, environment, self._rpc, self._limits, closing, self._keep).serve()
        finally:
            self._sockets -= 1

    # Helpers

    async def _find(self, episode_id: str) -> TurnstileEnvironment:
        """The environment of a detached episode; one without its key for an episode that REST or an owned socket
        started. Raises NotFound."""
        known = self._registry.get(episode_id)
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
        self._registry.add(environment)
        await self._registry.tidy()
