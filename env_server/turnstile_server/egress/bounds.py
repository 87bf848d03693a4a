"""Constants of this package: bounds that nobody has asked to change. Times are seconds, sizes bytes."""

from __future__ import annotations

from dataclasses import dataclass

from turnstile_server.settings import Bounds


@dataclass(frozen=True)
class EgressBounds(Bounds):
    """Bounds of the connections of one sandbox through the proxy."""

    resolver_threads: int = 16
    """Names looked up at once; further ones wait."""
    request_timeout_s: float = 15.0
    """Time for a client in the sandbox to send its request, and its TLS greeting."""
    connect_timeout_s: float = 10.0
    """Time to look up a host and to connect to it."""
    idle_timeout_s: float = 60.0
    """A connection on which nothing moves this long is cut."""
    max_header_bytes: int = 16 << 10
    """Largest head of a request or of a response; a larger one is refused."""
    max_client_hello_bytes: int = 16 << 10
    """Largest TLS greeting (ClientHello); a larger one is refused."""
    max_decisions: int = 200
    """Decisions that an episode's record keeps in full; of the further ones it has the number."""
