"""The seam between a sandbox with a helper and the way its backend is joined to the server."""

from __future__ import annotations

from typing import Protocol

from turnstile_server.sandboxes.network import SandboxNetwork


class SandboxLink(Protocol):
    """The link of a sandbox to the server beside the helper's connection: its listener of the agent endpoint."""

    @property
    def gate_inside(self) -> str:
        """Path inside of the Unix socket that leads to the agent endpoint."""
        ...

    @property
    def network(self) -> SandboxNetwork | None:
        """The way to the server's proxy; None where the sandbox may reach nothing."""
        ...

    @property
    def network_inside(self) -> str:
        """Path inside of its socket."""
        ...

    @property
    def carried(self) -> bool:
        """True: the helper makes these sockets, and carries their connections. False: they are the server's,
        mounted."""
        ...

    def admit(self, episode_id: str | None) -> None:
        """Serve this episode from now on; None: none."""
        ...

    async def close(self) -> None:
        """Cuts every connection, and removes what was made. May be called twice."""
        ...
