"""Constants of this package: bounds that nobody has asked to change. Times are seconds, sizes bytes."""

from __future__ import annotations

from dataclasses import dataclass

from turnstile_server.settings import Bounds


@dataclass(frozen=True)
class ControlBounds(Bounds):
    """Bounds of the control API."""

    max_wait_s: float = 60.0
    """Longest `?wait=`; a longer one is cut to this."""
    max_group_episodes: int = 64
    """Episodes that `GET /groups/{id}` shows beside each other, the newest ones."""
    window_tokens: int = 4096
    """Ceiling of `GET /turns/{id}/tokens?count=`, also where the request does not say."""
    found_tokens: int = 1000
    """Ceiling of `GET /turns/{id}/tokens/find?limit=`, also where the request does not say."""
    shown_breaks: int = 50
    """Ceiling of `GET /episodes/{id}/breaks?limit=`, also where the request does not say."""
    heartbeat_s: float = 15.0
    """`GET /events` sends a comment after this long without an event."""
