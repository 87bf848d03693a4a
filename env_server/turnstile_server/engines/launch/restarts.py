"""When an engine that has ended is started again: a policy without processes and without a clock of its own."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from turnstile_server.engines.launch.bounds import LaunchBounds
from turnstile_server.settings import LaunchSettings


@dataclass(frozen=True, slots=True)
class Restart:
    """Start it again in ``delay_s`` seconds."""

    delay_s: float


@dataclass(frozen=True, slots=True)
class GiveUp:
    """Do not start it again. ``reason`` is a sentence that names the setting."""

    reason: str


class RestartPolicy:
    """Decides after each end. It counts the restarts of the last ``restart_window_s`` seconds."""

    def __init__(self, settings: LaunchSettings) -> None:
        self._settings = settings
        self._restarts: deque[float] = deque()
        """When the restarts of the window were decided, oldest first."""

    def after_exit(self, now: float, code: int | None) -> Restart | GiveUp:
        """``now``: seconds of any monotonic clock. ``code``: the exit code; None where the engine was killed
        because it was not ready in time, or with its guardian."""
        settings, bounds = self._settings, self._settings.bounds_of(LaunchBounds)
        if settings.restart == "never":
            return GiveUp("launch.restart is never.")
        if settings.restart == "on_failure" and code == 0:
            return GiveUp("It ended by itself with exit code 0, and launch.restart is on_failure.")
        while self._restarts and self._restarts[0] <= now - bounds.restart_window_s:
            self._restarts.popleft()
        before = len(self._restarts)
        if before >= settings.max_restarts:
            return GiveUp(
                f"It was started again {before} times within {bounds.restart_window_s:g} s, which is "
                "launch.max_restarts."
            )
        self._restarts.append(now)
        # The exponent is bounded: a float overflows at 2**1024.
        return Restart(min(bounds.backoff_start_s * 2.0 ** min(before, 60), bounds.backoff_ceiling_s))
