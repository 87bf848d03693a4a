"""Names that settings had in earlier versions: one that is still used is refused, with the new place.

Some have another name now. Others are constants of the package that reads them, in a class of ``Bounds``: nobody
had asked to change them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import Any, Final

from turnstile_server.errors import StartupError
from turnstile_server.settings.section import Bounds

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
    "rendering.tool_format": "rendering.call_format",
}
"""Settings that have another name now: `workers` was about engines, `processes` about worker processes."""

MOVED_SECTIONS: Final = frozenset({"processes"})
"""Sections that are gone. Their environment variables have to be looked for: none is read for them."""


GONE: Final[Mapping[str, str]] = {
    "rendering.backend": "the model folder's own chat template is the one way to render",
    "openenv.preload": "the server needs no package of OpenEnv any more, and imports none",
    "agents.max_output_bytes": "the last 64 KiB of an agent's output are kept",
    "rendering.family": "the form of the model's calls is read off its chat template (rendering.call_format)",
}
"""Settings of what is no more, with what is in its place."""

_CONSTANTS: Final[Mapping[tuple[str, str], str]] = {
    ("control", "control.bounds:ControlBounds"): (
        "max_group_episodes window_tokens found_tokens shown_breaks heartbeat_s max_wait_s"
    ),
    ("control", "http.bounds:ListenerBounds"): (
        "head_timeout_s max_head_bytes max_headers body_timeout_s body_stall_s min_body_rate "
        "reserved_descriptors send_timeout_s"
    ),
    ("egress", "egress.bounds:EgressBounds"): (
        "resolver_threads request_timeout_s max_header_bytes max_client_hello_bytes max_decisions "
        "connect_timeout_s idle_timeout_s"
    ),
    ("engine", "engines.bounds:EngineBounds"): (
        "probe_timeout_s last_abort_s connect_attempts prompt_json_rest_s prompt_json_bytes max_answered"
    ),
    ("episodes", "episodes.bounds:EpisodeBounds"): (
        "oldest_every remembered_groups watch_interval_s max_subscribers subscriber_queue kept_events "
        "retention_interval_s export_threads max_reward_changes cached_trees searched_episodes "
        "cached_work_diffs kept_regrades snapshots_at_once snapshot_wait_s max_spans"
    ),
    ("episodes", "replay.recorder:ReplayBounds"): "replay_files replay_wait_s replays_at_once",
    ("fleet", "engines.fleet.bounds:FleetBounds"): (
        "start_calls min_calls min_episodes idle_episode_s load_interval_s health_interval_s health_timeout_s "
        "health_failures load_factor move_after_s remembered_episodes starving_s busy_pause_s max_resumes "
        "failovers catch_up_s"
    ),
    ("gate", "gate.bounds:GateBounds"): (
        "warm_s trim_s status_hold_s keepalive_s abort_grace_s inline_body_bytes render_threads "
        "huge_prompt_chars huge_prompt_threads inline_render_chars max_value_bytes max_messages"
    ),
    ("gate", "http.bounds:ListenerBounds"): (
        "head_timeout_s max_head_bytes max_headers body_timeout_s body_stall_s min_body_rate send_timeout_s"
    ),
    ("grading", "grading.bounds:GradingBounds"): (
        "retry_pause_s max_retry_pause_s probe_timeout_s runner_grace_s diff_timeout_s regex_timeout_s "
        "schema_timeout_s max_read_bytes max_log_bytes max_reward_bytes max_shown shown_changes shown_diff_bytes "
        "leak_search_max_file_bytes max_resource_session_bytes"
    ),
    ("journal", "journal.bounds:JournalBounds"): (
        "group_window_s soon_window_s inline_bytes inline_stall_s inline_pause_s index_lag_s reserve_bytes "
        "check_interval_s"
    ),
    ("launch", "engines.launch.bounds:LaunchBounds"): (
        "restart_window_s backoff_start_s backoff_ceiling_s kill_wait_s log_end_s log_lines"
    ),
    ("observability", "observability.bounds:LiveBounds"): "kept_samples",
    ("openenv", "control.openenv.openenv_parts:OpenEnvBounds"): "max_ahead kept",
    ("openenv", "http.bounds:ListenerBounds"): "ping_interval_s ping_timeout_s",
    ("sandboxes", "sandboxes.helper_sandbox:SandboxBounds"): (
        "output_grace_s terminals inotify_instances inotify_watches"
    ),
    ("sandboxes", "sandboxes.dial_out.listener:LinkBounds"): "unproven proof_s expected",
    ("sandboxes", "sandboxes.docker.volumes:VolumeBounds"): "docker_copy_timeout_s",
    ("sandboxes", "sandboxes.harbor.backend:HarborBounds"): "provide_s send_s dial_s remove_s",
    ("sandboxes", "sandboxes.kubernetes.backend:PodBounds"): "schedule_s pull_s gone_s",
    ("sandboxes", "sandboxes.kubernetes.claims:ClaimBounds"): "lease_s pools_s",
    ("sandboxes", "sandboxes.pool:PoolBounds"): "warm_specs",
    ("tasks", "tasks.bounds:TaskBounds"): "cached_rows max_rows max_class_tasks",
    ("tools", "http.bounds:ListenerBounds"): "body_timeout_s send_timeout_s",
    ("tools", "own_tools.bounds:OwnToolBounds"): (
        "own_close_timeout_s own_stuck_per_episode own_stuck_threads own_threads mount_grace_s "
        "mount_restart_s mount_max_restart_s mount_max_tools mount_max_notifications mount_max_garbage_bytes "
        "own_max_result_values"
    ),
    ("tools", "tools.bounds:McpBounds"): (
        "progress_s session_idle_s resume_s retry_s keep_events_s max_events max_event_bytes "
        "max_sessions_per_episode own_max_arguments_bytes max_requests_per_episode max_body_values"
    ),
    ("tracing", "observability.bounds:TracingBounds"): "batch_spans max_queued shutdown_s",
    ("workers", "workers.bounds:WorkerBounds"): (
        "restart_window_s backoff_start_s poll_s poll_timeout_s max_connections"
    ),
}
CONSTANTS: Final[Mapping[str, str]] = {
    f"{section}.{name}": place for (section, place), names in _CONSTANTS.items() for name in names.split()
}
"""The settings that are constants now: each by the module, below ``turnstile_server``, and the class it is in."""


def refuse_moved(values: Mapping[str, Any]) -> None:
    """Raise StartupError when ``values``, nested like the settings' file, has a name of an earlier version."""
    faults = list(_faults(values))
    if faults:
        raise StartupError("\n".join(faults))


def bounds_class(place: str) -> type[Bounds]:
    """The class that a value of ``CONSTANTS`` names."""
    module, _, name = place.partition(":")
    found: type[Bounds] = getattr(import_module(f"turnstile_server.{module}"), name)
    return found


def _faults(values: Mapping[str, Any]) -> Iterator[str]:
    for section, fields in values.items():
        for field in fields if isinstance(fields, Mapping) else ():
            name = MOVED.get(f"{section}.{field}", f"{section}.{field}")
            if name in GONE:
                yield f"setting {section}.{field}: it is gone since this version, {GONE[name]}; leave it out"
            elif name in CONSTANTS:
                yield f"setting {section}.{field}: it is a constant since this version, {_constant(name)}"
            elif name != f"{section}.{field}":
                yield f"setting {section}.{field}: it is {name} since this version"


def _constant(name: str) -> str:
    place, field = CONSTANTS[name], name.rpartition(".")[2]
    bounds = bounds_class(place)
    where = (
        f"{bounds.__name__}.{field} = {getattr(bounds(), field)!r} in turnstile_server.{place.partition(':')[0]}"
    )
    return f"{where}; leave it out, and ask if you need another value"
