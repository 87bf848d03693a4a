"""Constants of this package: bounds that nobody has asked to change. Times are seconds, sizes bytes."""

from __future__ import annotations

from dataclasses import dataclass

from turnstile_server.settings import Bounds


@dataclass(frozen=True)
class OwnToolBounds(Bounds):
    """Bounds of own tools and of mounted MCP servers."""

    own_close_timeout_s: float = 10.0
    """Time to close each part of the state of own tools when an episode ends."""
    own_threads: int = 128
    """Calls at once of own tools that are not async; further ones wait, within their time."""
    own_stuck_per_episode: int = 4
    """Calls of one episode that outlived their time and still run; more are refused."""
    own_stuck_threads: int = 64
    """The same over all episodes. Python cannot stop a thread: only a restart ends them."""
    mount_grace_s: float = 2.0
    """Time for a mounted server to end when it is told to; then its process group is killed."""
    mount_restart_s: float = 1.0
    """Pause before a mounted server that died is started again; doubled after each failure."""
    mount_max_restart_s: float = 60.0
    """The longest such pause."""
    mount_max_tools: int = 128
    """Tools that a mounted server may name; more are a failure."""
    mount_max_notifications: int = 10_000
    """Notifications of a mounted server in ten seconds; one that sends more is cut off."""
    mount_max_garbage_bytes: int = 32 << 20
    """Output of a mounted server in ten seconds that is no message, or too large for a result; one that sends more
    is cut off."""
    own_max_result_values: int = 50_000
    """JSON values in the result of a function that runs in the sandbox; more are an error. They are read on the
    event loop."""
    mount_send_s: float = 30.0
    """Time for a mounted server to take a message; then it is cut off."""
