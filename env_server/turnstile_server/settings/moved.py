"""Names that settings had in earlier versions: one that is still used is refused, with the new place."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from turnstile_server.errors import StartupError

_OF_THE_FLEET: Final = (
    *("adaptive", "start_calls", "min_calls", "min_episodes", "cache_fill", "idle_episode_s", "load_interval_s"),
    *("health_interval_s", "health_timeout_s", "health_failures", "hang_s", "load_factor", "move_after_s"),
    *("remembered_episodes", "max_waiting", "starving_s", "no_worker_s", "failovers", "busy_pause_s", "on_abort"),
    *("max_resumes", "drain_s", "sleep_wait_s", "update_idle_s", "catch_up_s", "pause_alarm_s"),
)
_OF_THE_WORKERS: Final = (
    *("count", "one_agent_port", "max_restarts", "restart_window_s", "backoff_start_s", "backoff_ceiling_s"),
    *("wait_s", "poll_s", "poll_timeout_s", "max_connections"),
)
MOVED: Final[Mapping[str, str]] = {
    **{f"workers.{name}": f"fleet.{name}" for name in _OF_THE_FLEET},
    **{f"processes.{name}": f"workers.{name}" for name in _OF_THE_WORKERS},
}
"""Settings that have another name now: `workers` was about engines, `processes` about worker processes."""

MOVED_SECTIONS: Final = frozenset({"processes"})
"""Sections that are gone. Their environment variables have to be looked for: none is read for them."""


def refuse_moved(values: Mapping[str, Any]) -> None:
    """Raise StartupError when ``values``, nested like the settings' file, has a name of an earlier version."""
    faults = list(_faults(values))
    if faults:
        raise StartupError("\n".join(faults))


def _faults(values: Mapping[str, Any]) -> Iterator[str]:
    for section, fields in values.items():
        for name in (f"{section}.{field}" for field in fields) if isinstance(fields, Mapping) else ():
            if name in MOVED:
                yield f"setting {name}: it is {MOVED[name]} since this version"
