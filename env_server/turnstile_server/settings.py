"""Every setting, limit and time-out of the server, by name, with its default and what it bounds.

Precedence: command-line flag > ``TURNSTILE_*`` environment variable (``TURNSTILE_GATE__MAX_BODY_BYTES``) >
``--config`` file (TOML) > default. ``docs/settings.md`` is generated from the field descriptions.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field
from pydantic.fields import FieldInfo
from pydantic_settings import (
    BaseSettings,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    TomlConfigSettingsSource,
)

from turnstile.models import Sampling


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class ControlSettings(Section):
    host: str = Field("127.0.0.1", description="Address of the control listener.")
    port: int = Field(8000, ge=0, le=65535, description="Port of the control listener; 0 takes a free one.")
    auth: bool = Field(True, description="False switches the control key off (only behind something else).")
    key: str | None = Field(
        None, min_length=16, description="Control key (`TURNSTILE_CONTROL_KEY`); None: made at first start."
    )
    max_body_bytes: int = Field(8 << 20, ge=1024, description="Largest control request; more is 413.")
    max_wait_s: float = Field(60.0, gt=0, description="Ceiling of `?wait=`; more is cut to this.")
    page_size: int = Field(100, ge=1, le=1000, description="Episodes per page of `GET /episodes`.")
    heartbeat_s: float = Field(15.0, gt=0, description="Silence on `GET /events` after which a comment is sent.")
    send_timeout_s: float = Field(
        30.0, gt=0, description="A reader of `GET /events` that takes no bytes for this long is dropped."
    )


class OpenEnvSettings(Section):
    """OpenEnv's routes on the control door."""

    preload: bool = Field(
        False, description="Import openenv-core in the background after the start, not at the first request of it."
    )
    wait_s: float = Field(
        45.0,
        gt=0,
        description="`reset`, `wait`, `finish` answer after this at the latest; published clients give up at 60.",
    )
    max_sockets: int = Field(1024, ge=1, description="WebSockets at once; more are told CAPACITY_REACHED.")
    max_ahead: int = Field(
        16, ge=1, description="Frames a socket may send ahead of their answers; then it is closed."
    )
    kept: int = Field(
        1024, ge=1, description="Detached episodes whose key and step count are kept once they ended."
    )
    ping_interval_s: float = Field(20.0, gt=0, description="How often a socket's peer is pinged.")
    ping_timeout_s: float = Field(60.0, gt=0, description="A peer that answers no ping for this long is gone.")


class GateSettings(Section):
    host: str = Field("127.0.0.1", description="Address of the agent listener (TCP).")
    port: int = Field(8001, ge=0, le=65535, description="Port of the agent listener; 0 takes a free one.")
    public_url: str | None = Field(
        None, description="URL that agents reach the gate by, if not `http://HOST:PORT`."
    )
    max_body_bytes: int = Field(32 << 20, ge=1024, description="Largest model call; more is 413.")
    body_timeout_s: float = Field(30.0, gt=0, description="Time to receive a call's body; later is 408.")
    max_calls: int = Field(
        256,
        ge=1,
        description="Model calls in flight over all episodes, those that only count tokens too; more is 429.",
    )
    max_calls_per_episode: int = Field(32, ge=1, description="Model calls in flight per episode; more is 429.")
    status_hold_s: float = Field(
        15.0,
        gt=0,
        description="A streamed call's status is withheld until the engine's first chunk, at most this.",
    )
    keepalive_s: float = Field(10.0, gt=0, description="Silence on a stream after which a keep-alive is sent.")
    send_timeout_s: float = Field(30.0, gt=0, description="A caller that takes no bytes for this long is gone.")
    max_refusals: int = Field(5, ge=1, description="Refusals in a row after which the episode is ended.")
    drain_s: float = Field(
        10.0, ge=0, description="`finish` waits this long for calls in flight, then aborts them."
    )
    abort_grace_s: float = Field(
        5.0,
        gt=0,
        description="Time for the engine to confirm an abort (and give the tokens so far); then cut off.",
    )
    idle_connection_s: float = Field(
        75.0,
        gt=0,
        description="An idle keep-alive connection is closed after this; longer than clients pool theirs.",
    )
    render_threads: int = Field(2, ge=1, description="Worker threads for long renders.")
    inline_render_chars: int = Field(
        20_000, ge=0, description="Renders of more characters than this leave the event loop for a worker thread."
    )


class EpisodeSettings(Section):
    """Server-wide ceilings and defaults of an episode's limits."""

    max_open: int = Field(
        1024, ge=1, description="Episodes that may be open at once, queued ones too; more is 429."
    )
    max_running: int = Field(
        16,
        ge=1,
        description="Episodes with a sandbox that are prepared, run and graded at once; others are queued.",
    )
    max_turns: int = Field(1000, ge=1, description="Ceiling of `limits.max_turns`.")
    max_completion_tokens: int = Field(32_768, ge=1, description="Ceiling of `limits.max_completion_tokens`.")
    max_sampled_tokens: int = Field(4_000_000, ge=1, description="Ceiling of `limits.max_sampled_tokens`.")
    wall_s: float = Field(14_400.0, gt=0, description="Ceiling of `limits.wall_s`; then `timed_out`.")
    idle_s: float = Field(3_600.0, gt=0, description="Ceiling of `limits.idle_s`; then `timed_out`.")
    finish_wait_s: float = Field(
        30.0, ge=0, description="`finish` waits this long for the grading, then answers `grading`."
    )
    watch_interval_s: float = Field(1.0, gt=0, description="How often wall and idle limits are looked at.")
    max_subscribers: int = Field(64, ge=1, description="Readers of `GET /events` at once; more is 429.")
    subscriber_queue: int = Field(
        1000, ge=1, description="Changes a reader of `/events` may lag behind; then it is cut."
    )
    retention_interval_s: float = Field(60.0, gt=0, description="How often the journal's retention is applied.")
    export_threads: int = Field(2, ge=1, description="Worker threads that export samples of ended episodes.")
    audit_tolerance: float = Field(
        1e-4, gt=0, description="Largest |recorded − re-scored logprob| in nats that passes an audit."
    )
    cached_trees: int = Field(64, ge=1, description="Token trees of ended episodes kept in memory.")
    trained_share_alert: float = Field(
        0.9,
        ge=0,
        le=1,
        description="An episode that ends with a smaller trained/sampled share is logged and counted.",
    )


class SandboxSettings(Section):
    """Where launched agents, tools and hidden tests run."""

    kind: Literal["auto", "docker", "local", "none"] = Field(
        "auto", description="`auto`: Docker if its engine answers, else bubblewrap if it works, else none."
    )
    allow_unisolated: bool = Field(
        False, description="`local` without bubblewrap: agents run with the server's own rights. Never in earnest."
    )
    docker_host: str | None = Field(
        None, description="Docker engine's address; None: `DOCKER_HOST`, then the socket."
    )
    docker_image: str = Field("python:3.11-slim", description="`docker`: image of tasks that name none.")
    docker_timeout_s: float = Field(60.0, gt=0, description="Time for one call of the Docker engine.")
    docker_parallel: int = Field(4, ge=1, description="Calls of the Docker engine at once; more wait.")
    run_dir: Path | None = Field(
        None, description="Folder of the sandboxes' sockets; short (Unix sockets); None: one in the temp folder."
    )
    memory_mb: int = Field(
        1024, ge=16, description="Memory of a sandbox: default and ceiling; an agent's spec may need more."
    )
    cpus: float = Field(1.0, gt=0, description="CPUs of a sandbox: default and ceiling.")
    pids: int = Field(
        256, ge=8, description="Processes of a sandbox: default and ceiling; an agent's spec may need more."
    )
    disk_mb: int = Field(512, ge=1, description="Size of a sandbox's work folder, and of its /tmp.")
    agent_uid: int = Field(61001, ge=1, description="User id of the agent and its tools.")
    tests_uid: int = Field(61002, ge=1, description="User id of hidden tests.")
    max_open: int = Field(128, ge=1, description="Sandboxes at once, warm ones included; more wait for one.")
    wait_s: float = Field(600.0, gt=0, description="Time to wait for room for a sandbox; then 503.")
    start_timeout_s: float = Field(60.0, gt=0, description="From create to the helper's call; then 503.")
    call_timeout_s: float = Field(30.0, gt=0, description="Time for the helper to answer what runs no command.")
    max_connections: int = Field(
        256, ge=1, description="Connections of one sandbox to its door at once; more are closed."
    )
    output_grace_s: float = Field(
        0.25,
        ge=0,
        description="After a command's end, time for output that its children still hold; then they are killed.",
    )
    warm: int = Field(0, ge=0, description="Sandboxes kept ready for each of the latest specs; 0 keeps none.")
    warm_specs: int = Field(2, ge=1, description="How many of the latest specs have warm sandboxes.")
    warm_retry_s: float = Field(
        1.0, gt=0, description="Pause after a warm sandbox could not be made; doubled each time, up to a minute."
    )
    max_file_bytes: int = Field(16 << 20, ge=1024, description="Largest file read or written at once.")
    max_archive_bytes: int = Field(
        64 << 20, ge=1024, description="Largest upload, and largest work folder fetched."
    )


class ToolSettings(Section):
    """The tool door."""

    command_timeout_s: float = Field(60.0, gt=0, description="`bash`: time for a command that asks for none.")
    max_command_timeout_s: float = Field(600.0, gt=0, description="`bash`: most a command may ask for.")
    max_output_chars: int = Field(16_000, ge=256, description="Result of `bash`; more is cut in the middle.")
    max_file_chars: int = Field(64_000, ge=256, description="Result of `read_file`; more is cut, and said so.")
    max_file_bytes: int = Field(
        4 << 20, ge=1024, description="Largest file that `read_file`, `write_file` and `edit_file` take."
    )
    max_answer_chars: int = Field(16_000, ge=16, description="Longest answer `submit` takes.")
    max_calls_per_episode: int = Field(8, ge=1, description="Tool calls in flight per episode; more are refused.")
    max_sessions_per_episode: int = Field(64, ge=1, description="MCP sessions per episode; more are refused.")
    session_idle_s: float = Field(1800.0, gt=0, description="A session without a request for this long is closed.")
    max_requests_per_episode: int = Field(
        128, ge=1, description="MCP requests in flight per episode, open streams included; more are 429."
    )
    max_body_bytes: int = Field(4 << 20, ge=1024, description="Largest MCP request; more is 413.")
    body_timeout_s: float = Field(30.0, gt=0, description="Time to receive an MCP request's body; later is 408.")
    send_timeout_s: float = Field(30.0, gt=0, description="A caller that takes no bytes for this long is gone.")


class TaskSettings(Section):
    sources: tuple[Path, ...] = Field(
        (), description="Task files (YAML, JSONL) or folders of them; none: the tasks that ship with Turnstile."
    )
    inline: bool = Field(True, description="Whether episodes may bring their task along.")
    max_source_bytes: int = Field(64 << 20, ge=1024, description="Largest task file (YAML, JSONL).")
    max_folder_files: int = Field(5_000, ge=1, description="Most files in one `folder` of a task.")
    max_folder_bytes: int = Field(32 << 20, ge=1024, description="Largest `folder` of a task, all files together.")


class GradingSettings(Section):
    parallel: int = Field(2, ge=1, description="Episodes graded at once; more wait.")
    timeout_s: float = Field(600.0, gt=0, description="Time for one grading, sandbox and all; then no reward.")
    attempts: int = Field(2, ge=1, description="Tries when the infrastructure fails under a grading.")
    diff_timeout_s: float = Field(
        60.0, gt=0, description="Time to find and apply what the work changed; then the work scores 0."
    )
    max_changed_files: int = Field(
        5_000, ge=1, description="Files that a work may add, change or delete; with more it scores 0."
    )
    regex_timeout_s: float = Field(5.0, gt=0, description="Time to match one answer; then it scores 0.")
    max_shown: int = Field(20, ge=1, description="Failed tests, and paths of each kind, shown in a grade.")


class AgentSettings(Section):
    specs: tuple[Path, ...] = Field(
        (), description="Folders of further agent specs (`*.yaml`); one may replace an agent that ships, by name."
    )
    install_dir: Path | None = Field(
        None, description="Folder of installed agents; None: `turnstile/agents` in the user's cache folder."
    )
    install_timeout_s: float = Field(900.0, gt=0, description="Time to install one agent.")
    max_output_bytes: int = Field(64 << 10, ge=1024, description="Of an agent's output, the last bytes kept.")


class EngineSettings(Section):
    kind: Literal["embedded", "sglang", "trainer", "none"] = Field(
        "embedded",
        description="Which engine samples; `trainer`: the training loop does. `none`: no model; `/health` is "
        "answered, all else is 503.",
    )
    url: str | None = Field(None, description="`sglang`: base URL of the running server.")
    connect_timeout_s: float = Field(5.0, gt=0, description="Time to open a connection to the engine.")
    start_timeout_s: float = Field(120.0, gt=0, description="Time for the engine to become ready at start.")
    first_chunk_timeout_s: float = Field(
        600.0, gt=0, description="Time to the engine's first chunk (unstreamed: to its answer); then 504."
    )
    chunk_timeout_s: float = Field(120.0, gt=0, description="Silence between two chunks of a stream; then 504.")
    control_timeout_s: float = Field(60.0, gt=0, description="Time for pause, resume, abort, state, score.")
    weights_timeout_s: float = Field(600.0, gt=0, description="Time to load new weights.")
    stop_grace_s: float = Field(
        5.0, ge=0, description="At close: time for aborts under way, then (`embedded`) before SIGKILL."
    )
    connect_attempts: int = Field(
        3, ge=1, description="Attempts to open a connection; a request that was sent is never repeated."
    )
    max_connections: int = Field(512, ge=1, description="Calls in flight on the engine; more wait.")
    max_reply_bytes: int = Field(
        256 << 20, ge=1 << 16, description="Largest answer, or chunk of a stream, of the engine."
    )
    max_batch: int = Field(16, ge=1, description="`embedded`: calls decoded together; others wait.")
    context_length: int | None = Field(
        None, ge=16, description="Context window; None takes the engine's. Never more than the engine's."
    )
    threads: int = Field(1, ge=1, description="`embedded`: torch threads.")
    prefill_chunk: int = Field(
        512, ge=1, description="`embedded`: prompt tokens fed between two decoding steps of the other calls."
    )
    completion_timeout_s: float = Field(
        600.0,
        gt=0,
        description="`trainer`: how long a call waits for the training loop's completion, pauses aside; then 504.",
    )
    max_pending: int = Field(
        1024, ge=1, description="`trainer`: calls that wait for their completion at once; more are 429."
    )
    max_answered: int = Field(
        8192, ge=1, description="`trainer`: answered calls that are remembered, so that an answer can be repeated."
    )


class RenderingSettings(Section):
    backend: Literal["auto", "template", "renderers"] = Field(
        "auto",
        description="`template`: the model folder's chat template; `renderers`: that package; auto: template.",
    )
    family: str | None = Field(None, description="`renderers`: the model family, e.g. `qwen3`. Never guessed.")
    thinking_history: Literal["keep", "template"] = Field(
        "keep", description="`keep` leaves earlier thinking in context; `template` follows the stock template."
    )
    template_kwargs: dict[str, Any] = Field(
        default_factory=dict, description="Options of the chat template, e.g. `{enable_thinking = false}`."
    )
    tool_format: Literal["auto", "hermes", "none"] = Field(
        "auto", description="Call format of the `template` backend; auto reads it off the chat template."
    )


class JournalSettings(Section):
    durability: Literal["power", "process"] = Field(
        "power", description="`power`: fsync before a turn is acknowledged; `process`: survives kill -9 only."
    )
    segment_bytes: int = Field(256 << 20, ge=1 << 16, description="A segment is closed at this size.")
    group_window_s: float = Field(
        0.0, ge=0, le=1, description="Extra wait to gather appends into one fsync; 0 gathers only what is queued."
    )
    soon_window_s: float = Field(
        0.1,
        ge=0,
        le=10,
        description="Records that nobody waits for (deliveries) are written at latest after this.",
    )
    index_lag_s: float = Field(
        0.25, ge=0, le=60, description="The index is brought up to date at latest this long after an append."
    )
    max_queue_bytes: int = Field(256 << 20, ge=1 << 20, description="Appends waiting for the disk; more is 503.")
    retention_days: float | None = Field(None, gt=0, description="Ended episodes older than this are deleted.")
    retention_bytes: int | None = Field(None, ge=1 << 20, description="Oldest ended episodes go above this size.")
    min_free_bytes: int = Field(
        64 << 20, ge=0, description="Below this much free disk turns are refused (503); 0: no check."
    )


class _ShortControlKey(PydanticBaseSettingsSource):
    """``TURNSTILE_CONTROL_KEY``, the name that the client reads too, beside ``TURNSTILE_CONTROL__KEY``."""

    def get_field_value(self, field: FieldInfo, field_name: str) -> tuple[Any, str, bool]:
        return None, field_name, False

    def __call__(self) -> dict[str, Any]:
        key = os.environ.get("TURNSTILE_CONTROL_KEY")
        return {"control": {"key": key}} if key else {}


class Settings(BaseSettings):
    """All of it; ``docs/settings.md`` lists every field."""

    model_config = SettingsConfigDict(
        env_prefix="TURNSTILE_", env_nested_delimiter="__", extra="forbid", frozen=True
    )

    model: Path | None = Field(
        None, description="Hugging Face folder: tokenizer, chat template, weights (embedded)."
    )
    data_dir: Path = Field(Path("turnstile-data"), description="Journal, index, keys. One server per directory.")
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="Log level.")
    shutdown_grace_s: float = Field(
        10.0, ge=0, description="At shutdown, requests in progress get this long; then they are cut off."
    )
    sampling: Sampling = Field(Sampling(), description="Training sampling where task and episode say nothing.")
    control: ControlSettings = ControlSettings()
    openenv: OpenEnvSettings = OpenEnvSettings()
    gate: GateSettings = GateSettings()
    episodes: EpisodeSettings = EpisodeSettings()
    engine: EngineSettings = EngineSettings()
    rendering: RenderingSettings = RenderingSettings()
    journal: JournalSettings = JournalSettings()
    sandboxes: SandboxSettings = SandboxSettings()
    tools: ToolSettings = ToolSettings()
    tasks: TaskSettings = TaskSettings()
    grading: GradingSettings = GradingSettings()
    agents: AgentSettings = AgentSettings()

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return (init_settings, env_settings, _ShortControlKey(settings_cls))


def load_settings(flags: dict[str, Any], config: Path | None = None) -> Settings:
    """Merges flags over the environment over the TOML file ``config`` over the defaults.

    ``flags`` is nested like the file. Raises pydantic.ValidationError or OSError / tomllib.TOMLDecodeError.
    """
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
                TomlConfigSettingsSource(settings_cls, config),
            )

    return FromFile(**flags)
