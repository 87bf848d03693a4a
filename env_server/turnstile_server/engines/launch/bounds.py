"""Constants of this package: bounds that nobody has asked to change. Times are seconds, sizes bytes."""

from __future__ import annotations

from dataclasses import dataclass

from turnstile_server.settings import Bounds


@dataclass(frozen=True)
class LaunchBounds(Bounds):
    """Bounds of an engine that the server starts."""

    restart_window_s: float = 900.0
    """Time in which restarts are counted."""
    backoff_start_s: float = 1.0
    """Wait before a restart; each one that the window has doubles it."""
    backoff_ceiling_s: float = 60.0
    """Longest wait before a restart."""
    kill_wait_s: float = 30.0
    """Time for killed processes to be gone; then the server goes on without, and says so."""
    log_end_s: float = 5.0
    """Time to read the rest of an engine's log, once its processes are gone."""
    log_lines: int = 40
    """Last lines of the engine's log that an error repeats."""
