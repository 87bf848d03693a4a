"""The agent endpoint of sandboxes: the seam between the server's HTTP and the sandbox backends.

At its start a provider is handed one ``AgentEndpoint``. Through it the provider opens one listener per sandbox, of
the kind that its sandboxes can reach: a Unix socket, for a backend that mounts the socket into the sandbox, or TCP
with a token, for a backend whose sandboxes run elsewhere and whose tunnel ends on this machine. The provider sees
no request, and the HTTP side sees no mount and no tunnel.

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


class TcpEpisodeListener(EpisodeListener, Protocol):
    """A listener on a TCP port of this machine, for the near end of a tunnel."""

    @property
    def address(self) -> tuple[str, int]:
        """Host and port to connect to."""
        ...

    @property
    def token(self) -> str:
        """The first line of every connection: ``token`` and a newline, before the first byte of HTTP. It keeps
        other programs of this machine, and other sandboxes, out."""
        ...


class AgentEndpoint(Protocol):
    """Opens listeners. Owns the HTTP protocol, its limits and the app; a listener is owned by its sandbox."""

    async def listen_unix(self, path: Path) -> EpisodeListener:
        """Listens on a new Unix socket at ``path`` that any user may connect to: the folder above guards it.
        Raises OSError; then nothing is left."""
        ...

    async def listen_tcp(self, host: str = "127.0.0.1") -> TcpEpisodeListener:
        """Listens on a free TCP port of ``host``. Raises OSError."""
        ...
