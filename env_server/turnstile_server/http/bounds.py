"""Constants of this package: bounds that nobody has asked to change. Times are seconds, sizes bytes."""

from __future__ import annotations

from dataclasses import dataclass

from turnstile_server.settings import Bounds


@dataclass(frozen=True)
class ListenerBounds(Bounds):
    """Bounds on the clients of a listener, and on the bodies that they send."""

    head_timeout_s: float = 15.0
    """Time for the head of a request from its first byte, or from the opening of the connection; then 408."""
    max_head_bytes: int = 64 << 10
    """Largest head of a request, and largest trailers; larger ones are 431."""
    max_headers: int = 128
    """Headers of a request; more are 431."""
    body_timeout_s: float = 30.0
    """Time to receive the body of a request; then 408."""
    body_stall_s: float = 5.0
    """Window in which a body must keep up `min_body_rate`, else 408; and time to read the rest of a body that is
    refused."""
    min_body_rate: int = 8192
    """Bytes a second that a body must bring on average over each `body_stall_s`."""
    reserved_descriptors: int = 16
    """Descriptors kept for connections to the control API, for when everything else has used up the process's."""
    send_timeout_s: float = 30.0
    """A client that takes no bytes of its response for this long is disconnected."""
    ping_interval_s: float = 20.0
    """Time between two pings on a WebSocket."""
    ping_timeout_s: float = 60.0
    """A WebSocket whose client answers no ping for this long is closed."""
