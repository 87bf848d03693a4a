"""Every setting of the server: its name, its default and what it means. Other bounds are constants (``section``).

A command-line flag wins over an environment variable (``TURNSTILE_GATE__MAX_BODY_BYTES``), that over the file
given with ``--config`` (TOML), that over the default. ``docs/settings.md`` is generated from the descriptions.

Read ``load`` first (all settings together, and how they are read), then the sections: ``listeners`` (control,
openenv, gate), ``episodes`` (episodes, tasks, agents, grading; ``replay`` has a part of the first), ``worlds``,
``sandboxes`` (sandboxes, tools), ``egress`` (the network of sandboxes), ``engine`` (engine, rendering, journal),
``fleet`` (several engines), ``launch`` (an engine that the server starts) and ``workers`` (several worker
processes of one server). ``section`` is the base class of all sections, ``moved`` has the names of
earlier versions.
"""

from turnstile_server.settings.egress import EgressSettings
from turnstile_server.settings.engine import EngineSettings, JournalSettings, RenderingSettings
from turnstile_server.settings.episodes import AgentSettings, EpisodeSettings, GradingSettings, TaskSettings
from turnstile_server.settings.fleet import FleetSettings
from turnstile_server.settings.judges import JudgeSettings
from turnstile_server.settings.launch import LaunchSettings
from turnstile_server.settings.listeners import ControlSettings, GateSettings, OpenEnvSettings
from turnstile_server.settings.load import Settings, load_settings
from turnstile_server.settings.observability import ObservabilitySettings, TracingSettings
from turnstile_server.settings.sandboxes import SandboxSettings, ToolSettings
from turnstile_server.settings.section import BoundedSection, Bounds, Section
from turnstile_server.settings.workers import WorkerCount, WorkerSettings
from turnstile_server.settings.worlds import WorldSettings

__all__ = [
    "AgentSettings",
    "BoundedSection",
    "Bounds",
    "ControlSettings",
    "EgressSettings",
    "EngineSettings",
    "EpisodeSettings",
    "FleetSettings",
    "GateSettings",
    "GradingSettings",
    "JournalSettings",
    "JudgeSettings",
    "LaunchSettings",
    "ObservabilitySettings",
    "OpenEnvSettings",
    "RenderingSettings",
    "SandboxSettings",
    "Section",
    "Settings",
    "TaskSettings",
    "ToolSettings",
    "TracingSettings",
    "WorkerCount",
    "WorkerSettings",
    "WorldSettings",
    "load_settings",
]
