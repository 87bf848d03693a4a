"""Constants of this package: bounds that nobody has asked to change. Times are seconds, sizes bytes."""

from __future__ import annotations

from dataclasses import dataclass

from turnstile_server.settings import Bounds


@dataclass(frozen=True)
class WorkerBounds(Bounds):
    """Bounds of the process in front of several worker processes."""

    restart_window_s: float = 300.0
    """Time in which restarts are counted."""
    backoff_start_s: float = 0.25
    """Wait before a restart; each one that the window has doubles it."""
    poll_s: float = 0.5
    """How often each worker is asked for its load, by which episodes are placed."""
    poll_timeout_s: float = 5.0
    """Time for that answer; a worker that does not give it gets no new episodes."""
    max_connections: int = 1024
    """Connections from the process in front to one worker, and requests at once."""
