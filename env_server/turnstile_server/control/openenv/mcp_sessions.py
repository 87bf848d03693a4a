"""Sessions of standard MCP clients at ``/mcp``: each has one episode, and is named by ``Mcp-Session-Id``.

MCP, streamable HTTP: the server names a session in its answer to ``initialize``; the client repeats the name in
every request, and ends the session with DELETE
(https://modelcontextprotocol.io/specification/2025-06-18/basic/transports#session-management). A client that goes
without DELETE leaves a detached episode, which ends by its own limits.
"""

from __future__ import annotations

import uuid

from turnstile_server.control.openenv.environment import TurnstileEnvironment
from turnstile_server.errors import NotFound, QueueFull


class McpSessions:
    """At most ``most`` sessions. A new one takes the place of the oldest that plays no episode."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._environments: dict[str, TurnstileEnvironment] = {}

    def __len__(self) -> int:
        return len(self._environments)

    async def open(self, environment: TurnstileEnvironment) -> str:
        """The name of a new session. Raises QueueFull where ``most`` sessions have a running episode."""
        if len(self._environments) >= self._most:
            await self._drop_one()
        name = uuid.uuid4().hex
        self._environments[name] = environment
        return name

    def get(self, name: str) -> TurnstileEnvironment:
        """Raises NotFound: the client then begins a new session, as MCP says."""
        found = self._environments.get(name)
        if found is None:
            raise NotFound("there is no such MCP session (Mcp-Session-Id): initialize again")
        return found

    async def close(self, name: str) -> None:
        """End the session and its episode. Raises NotFound."""
        environment = self.get(name)
        del self._environments[name]
        if environment.episode_id is not None:
            await environment.close_session()

    async def _drop_one(self) -> None:
        for name, environment in list(self._environments.items()):
            if await environment.has_ended():
                self._environments.pop(name, None)
                return
        raise QueueFull(
            f"{len(self._environments)} MCP sessions play an episode, the server's limit (openenv.max_sessions)",
            retry_after_s=5.0,
        )
