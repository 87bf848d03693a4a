"""All settings together, and the sources they are read from."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, model_validator
from pydantic.fields import FieldInfo
from pydantic_settings import (
    BaseSettings,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    SettingsError,
    TomlConfigSettingsSource,
)

from turnstile.models import Sampling
from turnstile_server.demo import model_folder
from turnstile_server.errors import StartupError
from turnstile_server.settings.egress import EgressSettings
from turnstile_server.settings.engine import EngineSettings, JournalSettings, RenderingSettings
from turnstile_server.settings.episodes import AgentSettings, EpisodeSettings, GradingSettings, TaskSettings
from turnstile_server.settings.fleet import FleetSettings
from turnstile_server.settings.launch import LaunchSettings
from turnstile_server.settings.listeners import ControlSettings, GateSettings, OpenEnvSettings
from turnstile_server.settings.moved import MOVED_SECTIONS, refuse_moved
from turnstile_server.settings.observability import ObservabilitySettings, TracingSettings
from turnstile_server.settings.sandboxes import SandboxSettings, ToolSettings
from turnstile_server.settings.workers import WorkerSettings
from turnstile_server.settings.worlds import WorldSettings

_PREFIX = "TURNSTILE_"


class _ShortControlKey(PydanticBaseSettingsSource):
    """Reads ``TURNSTILE_CONTROL_KEY``, the client's variable, as a second name of ``TURNSTILE_CONTROL__KEY``."""

    def get_field_value(self, field: FieldInfo, field_name: str) -> tuple[Any, str, bool]:
        return None, field_name, False

    def __call__(self) -> dict[str, Any]:
        key = os.environ.get("TURNSTILE_CONTROL_KEY")
        return {"control": {"key": key}} if key else {}


class _MovedVariables(PydanticBaseSettingsSource):
    """Reads the variables of sections that are gone, so that they are refused and not ignored."""

    def get_field_value(self, field: FieldInfo, field_name: str) -> tuple[Any, str, bool]:
        return None, field_name, False

    def __call__(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for variable, value in os.environ.items():
            section, _, field = variable.lower().removeprefix(_PREFIX.lower()).partition("__")
            if variable.upper().startswith(_PREFIX) and section in MOVED_SECTIONS and field:
                found.setdefault(section, {})[field] = value
        return found


class Settings(BaseSettings):
    """All settings of a server; ``docs/settings.md`` lists every field."""

    model_config = SettingsConfigDict(env_prefix=_PREFIX, env_nested_delimiter="__", extra="forbid", frozen=True)

    model: Annotated[Path, AfterValidator(model_folder)] | None = Field(
        None,
        description="Hugging Face folder with tokenizer and chat template, for `embedded` with weights. `tiny`: "
        "the policy that ships, unless the working directory has a folder of that name. `upstream`: the hosted "
        "model's name on its server.",
    )
    data_dir: Path = Field(
        Path("turnstile-data"),
        description="Folder of the journal and the keys. Each server has its own.",
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="Log level.")
    start_wait_s: float = Field(
        8.0,
        ge=0,
        description="Requests that come while the server starts wait this long for it; then they are 503 "
        "`server_starting` with `Retry-After`. OpenEnv's clients give a connection 10 s.",
    )
    max_descriptors: int = Field(
        65_536,
        ge=64,
        description="At start the process's limit of open descriptors is raised to its hard limit, at most to "
        "this. Each listener gets a share of it for its connections.",
    )
    shutdown_grace_s: float = Field(
        10.0,
        ge=0,
        description="At shutdown, time for requests in progress; then they are 503 `server_stopping`, and "
        "streams end with that error. After SIGTERM, time for the open episodes.",
    )
    standstill_s: float = Field(
        60.0,
        ge=0,
        description="A server whose event loop has stood still for so long ends, with exit code 70 and its "
        "threads' stacks on stderr, so that whoever supervises it starts it again. 0: never.",
    )
    sampling: Sampling = Field(
        Sampling(), description="Training sampling where neither the episode nor the task sets it."
    )
    workers: WorkerSettings = WorkerSettings()
    control: ControlSettings = ControlSettings()
    openenv: OpenEnvSettings = OpenEnvSettings()
    gate: GateSettings = GateSettings()
    episodes: EpisodeSettings = EpisodeSettings()
    engine: EngineSettings = EngineSettings()
    fleet: FleetSettings = FleetSettings()
    launch: LaunchSettings = LaunchSettings()
    rendering: RenderingSettings = RenderingSettings()
    journal: JournalSettings = JournalSettings()
    sandboxes: SandboxSettings = SandboxSettings()
    egress: EgressSettings = EgressSettings()
    tools: ToolSettings = ToolSettings()
    tasks: TaskSettings = TaskSettings()
    worlds: WorldSettings = WorldSettings()
    grading: GradingSettings = GradingSettings()
    agents: AgentSettings = AgentSettings()
    tracing: TracingSettings = TracingSettings()
    observability: ObservabilitySettings = ObservabilitySettings()

    @model_validator(mode="before")
    @classmethod
    def _refuse_moved(cls, values: dict[str, Any]) -> dict[str, Any]:
        refuse_moved(values)
        return values

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return (init_settings, env_settings, _ShortControlKey(settings_cls), _MovedVariables(settings_cls))


def load_settings(flags: dict[str, Any], config: Path | None = None) -> Settings:
    """Read the settings from flags, environment, the TOML file ``config`` and defaults; the earlier source wins.

    ``flags`` is nested like the file. Raises pydantic.ValidationError for an impossible value,
    StartupError for a name that a setting had in an earlier version, and for a variable that must be JSON and is
    not, OSError or tomllib.TOMLDecodeError for a file that cannot be read.
    """
    try:
        return _load(flags, config)
    except SettingsError as error:
        raise StartupError(
            f"{error}: lists and mappings are JSON in the environment, as TURNSTILE_TASKS__SOURCES='[\"a.yaml\"]'"
        ) from error


def _load(flags: dict[str, Any], config: Path | None) -> Settings:
    if config is None:
        return Settings(**flags)

    class FromFile(Settings):
        @classmethod
        def settings_customise_sources(
            cls,
            settings_cls: type[BaseSettings],
            init_settings: PydanticBaseSettingsSource,
            env_settings: PydanticBaseSettingsSource,
            dotenv_settings: PydanticBaseSettingsSource,
            file_secret_settings: PydanticBaseSettingsSource,
        ) -> tuple[PydanticBaseSettingsSource, ...]:
            return (
                init_settings,
                env_settings,
                _ShortControlKey(settings_cls),
                _MovedVariables(settings_cls),
                TomlConfigSettingsSource(settings_cls, config),
            )

    return FromFile(**flags)
