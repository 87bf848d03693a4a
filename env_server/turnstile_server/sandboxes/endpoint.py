"""The agent endpoint of sandboxes: the seam between the server's HTTP and the sandbox backends.

At its start a provider is handed one ``AgentEndpoint``. Through it the provider opens one listener per sandbox: a
Unix socket, which it mounts into the sandbox, or at which the stream of a sandbox elsewhere ends. The provider
sees no request, and the HTTP side sees no mount and no tunnel.

What must hold for every listener: it serves the model endpoint (``/e/{episode_id}/v1/…``) and the MCP endpoint
(``/e/{episode_id}/mcp``) of the one episode that is admitted, and nothing else: every other path, and every path
while no episode is admitted, is 404. A connection beyond the bound takes the place of an idle one, or gets 503.
"""

from __future__ import annotations

from pathlib import Path
from typing import Protocol


class EpisodeListener(Protocol):
    """The agent app as one sandbox reaches it."""

    def admit(self, episode_id: str | None) -> None:
        """From now on only this episode's paths are served; None serves none."""
        ...

    async def close(self) -> None:
        """Stops listening and cuts every connection. May be called twice."""
        ...


class AgentEndpoint(Protocol):
    """Opens listeners. Owns the HTTP protocol, its limits and the app; a listener is owned by its sandbox."""

    async def listen_unix(self, path: Path) -> EpisodeListener:
        """Listens on a new Unix socket at ``path`` that any user may connect to: the folder above guards it.
        Raises OSError; then nothing is left."""
        ...
