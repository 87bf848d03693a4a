"""The network traffic of an episode: what its sandboxes asked of the server's proxy, and what it decided."""

from __future__ import annotations

from enum import StrEnum

from turnstile.models.base import Model


class NetworkOutcome(StrEnum):
    """The outcome of one connection to the proxy. All but ``ok`` were refused, or cut before their end."""

    OK = "ok"
    REQUEST = "request"
    """It was no request that the proxy serves."""
    HOST = "host"
    """The host or its port is not on the allow-list of the phase."""
    ADDRESS = "address"
    """The host leads to an address that is not public, and that the server's settings do not allow."""
    NAME = "name"
    """The TLS greeting asks for another name than the tunnel's, for none, or hides it."""
    UNRESOLVED = "unresolved"
    """The host's name could not be looked up."""
    UNREACHABLE = "unreachable"
    """The host did not answer."""
    UPSTREAM = "upstream"
    """The host's response was not HTTP, or ended too early."""
    CONNECTIONS = "connections"
    """A bound of connections was reached: of the episode in all, or of the sandbox at once."""
    BYTES = "bytes"
    """The episode's budget of bytes was spent."""
    IDLE = "idle"
    """Nothing was sent for too long."""
    ENDED = "ended"
    """The phase that allowed it ended: the set-up, the agent's work, the tests, or the sandbox."""


class NetworkDecision(Model):
    """One connection to the proxy."""

    at: float
    """Unix time of its beginning."""
    phase: str
    """``setup``, ``agent`` or ``tests``."""
    method: str | None = None
    """``CONNECT`` for a tunnel, else the request's method. Paths, queries and headers are never kept."""
    host: str | None = None
    port: int | None = None
    address: str | None = None
    """The address that the host led to, where the proxy connected to it or refused it."""
    allowed: bool
    """True if bytes could pass."""
    outcome: NetworkOutcome
    detail: str | None = None
    """The refusal or failure, as the client was told."""
    bytes_up: int = 0
    bytes_down: int = 0
    duration_s: float = 0.0


class NetworkUse(Model):
    """The sum of an episode's decisions."""

    allowed: int = 0
    """Connections over which bytes could pass."""
    refused: int = 0
    bytes_up: int = 0
    bytes_down: int = 0


class NetworkReport(NetworkUse):
    """Answer to ``GET /episodes/{id}/network``: the sums, and the first decisions in full."""

    episode_id: str
    decisions: tuple[NetworkDecision, ...] = ()
    further: int = 0
    """Decisions after those (a record keeps the first 200)."""
