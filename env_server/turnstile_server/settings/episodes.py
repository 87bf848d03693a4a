"""Settings of episodes, their tasks, their agents and their grading."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from turnstile.models import SnapshotMode, StalenessPolicy, StalenessScope
from turnstile_server.settings.judges import JudgeSettings
from turnstile_server.settings.machine import default_episodes, default_gradings, machine_resources
from turnstile_server.settings.replay import ReplaySettings
from turnstile_server.settings.section import BoundedSection, CountCeiling, SecondsCeiling, Section


class EpisodeSettings(ReplaySettings):
    """The bounds on the number of episodes, and the ceilings of an episode's limits (also their defaults)."""

    @property
    def places(self) -> int:
        """``max_running``, or its default on this machine."""
        return self.max_running or default_episodes(machine_resources())

    max_open: int = Field(1024, ge=1, description="Episodes open at once, queued ones included; more are 429.")
    max_running: int | None = Field(
        None,
        ge=1,
        description="Episodes with a sandbox that are prepared or run at once; further ones are queued. None: 8 "
        "for each core and one for each 512 MiB of three quarters of the memory, whichever is less, from 4 to "
        "256. As many again may wait for their grade, where `sandboxes.max_open` has room for twice "
        "`grading.parallel` more.",
    )
    max_staleness: int | None = Field(
        None,
        ge=0,
        description="Default of `staleness.max_versions`: weight versions that may be served after an episode's "
        "first sampled token. None: no bound.",
    )
    staleness_scope: StalenessScope = Field("episode", description="Scope of the default bound: episode or group.")
    staleness_policy: StalenessPolicy = Field(
        "cancel", description="What the default bound does: cancel, finish or stop_admitting."
    )
    max_turns: CountCeiling = Field(1000, description="Ceiling of `limits.max_turns`.")
    max_completion_tokens: CountCeiling = Field(32_768, description="Ceiling of `limits.max_completion_tokens`.")
    max_sampled_tokens: CountCeiling = Field(4_000_000, description="Ceiling of `limits.max_sampled_tokens`.")
    wall_s: SecondsCeiling = Field(14_400.0, description="Ceiling of `limits.wall_s`; then `timed_out`.")
    idle_s: SecondsCeiling = Field(3_600.0, description="Ceiling of `limits.idle_s`; then `timed_out`.")
    resume_external: bool = Field(
        False,
        description="After a restart, the episodes of external agents go on with their keys and turns, where they "
        "have no sandbox, world or own tools. False: they are `failed`, `server_restarted`.",
    )
    finish_wait_s: float = Field(
        30.0,
        ge=0,
        description="`finish` waits this long for the grading; then it answers with the status `grading`.",
    )
    audit_tolerance: float = Field(
        1e-3, gt=0, description="Largest |recorded − re-scored logprob|, in nats, that passes an audit."
    )
    keep_work: Literal["all", "ungraded", "none"] = Field(
        "all",
        description="Which work is kept beside the journal, to be judged again (`turnstile episodes regrade`): "
        "all that was handed to grading; `ungraded`: only where grading gave no reward; none.",
    )
    keep_work_bytes: int = Field(
        4 << 30, ge=0, description="What kept work may take on disk; above it the oldest goes first."
    )
    keep_work_s: float | None = Field(
        14 * 86_400.0, gt=0, description="Kept work older than this is removed; none: kept as long as its episode."
    )
    snapshots: SnapshotMode = Field(
        "on_request",
        description="Default of an episode's `snapshots`: on_request, or every_turn where it can be forked.",
    )
    max_snapshots: int = Field(
        64,
        ge=1,
        description="Snapshots of one episode; more are refused (409). Those of every_turn make way.",
    )
    keep_snapshot_bytes: int = Field(
        8 << 30, ge=0, description="What snapshots may take on disk; above it the oldest goes first."
    )
    keep_snapshot_s: float | None = Field(
        86_400.0, gt=0, description="Snapshots older than this are removed; none: kept as long as their episode."
    )
    trained_share_alert: float = Field(
        0.9,
        ge=0,
        le=1,
        description="An episode that ends with a smaller share of trained to sampled tokens is logged and "
        "counted in a metric.",
    )


def _path_as_text(source: object) -> object:
    """A SOURCE is text, because a scheme (``hub://name``) is no path; paths are taken too."""
    return str(source) if isinstance(source, Path) else source


class TaskSettings(BoundedSection):
    """The sources of tasks."""

    sources: tuple[Annotated[str, BeforeValidator(_path_as_text)], ...] = Field(
        (),
        description="Task files (YAML, JSONL), folders of them, rows of data sets (`rows:PATH?OPTIONS`), Python "
        "classes (`file.py`, `file.py:Class`, `module:Class`), Harbor's task folders, and what task sources of "
        "other packages recognise; `module:object=SOURCE` names the task source too. Empty: the tasks that ship "
        "with Turnstile.",
    )
    inline: bool = Field(True, description="Accept tasks that are written into `POST /episodes` (inline tasks).")
    max_source_bytes: int = Field(
        64 << 20, ge=1024, description="Largest task file (YAML, JSONL; of Harbor's folders TOML and instruction)."
    )
    max_folder_files: int = Field(5_000, ge=1, description="Files in one `folder` of a task, at most.")
    max_folder_bytes: int = Field(
        32 << 20, ge=1024, description="Size of one `folder` of a task, at most, all files together."
    )
    max_row_bytes: int = Field(
        64 << 20,
        ge=1024,
        description="Largest row of a data set whose rows are tasks (`rows:`), and of what a package lists.",
    )
    max_row_group_bytes: int = Field(
        2 << 30, ge=1024, description="Largest group of rows of a Parquet file (`rows:`), unpacked."
    )
    git_history_timeout_s: float = Field(
        120.0, gt=0, description="Time to replace the repositories of a work folder by one commit each."
    )
    build_images: bool = Field(
        True,
        description="An image that a task brings as a Dockerfile is built before the first episode that needs it. "
        "False: `turnstile tasks build` makes it beforehand.",
    )
    public_network: bool = Field(
        False,
        description="Harbor: tasks whose network is `public` ask for every host, which `egress.allow` must have "
        "(`*`). False: they are played without a network.",
    )
    prefer_builds: bool = Field(
        False, description="Harbor: build the Dockerfile also where `docker_image` names an image."
    )
    rehearse_tests: bool = Field(
        False,
        description="Harbor: tests that fetch something run once, with a network, while an image for them "
        "is built, and judge in that image without one. False: such tasks are refused.",
    )
    max_context_bytes: int = Field(
        512 << 20, ge=1024, description="Size of the folder that an image is built of, at most."
    )
    host_env: tuple[str, ...] = Field(
        (),
        description="Harbor: variables of the server's own environment that tasks may take (`${NAME}` in `env`).",
    )
    solution_timeout_s: float = Field(
        600.0, gt=0, description="Harbor: time for the solution of a task that names no time for its agent."
    )
    inspect_scripts: bool = Field(
        True,
        description="Harbor: refuse tasks whose tests plainly need a network, a service, or files outside the "
        "work folder. False: only what `task.toml` says counts.",
    )
    skip_unsupported: bool = Field(
        False,
        description="Harbor: leave out, and log, sound tasks that cannot be played here. False: they stop the "
        "start.",
    )
    package_pythons: dict[Literal["inspect", "swebench", "verifiers"], Path] = Field(
        default_factory=dict,
        description="The Python that has a package which lists or scores tasks ([packages](task-packages.md), "
        "[SWE-bench rows](task-sources.md)), by its kind; none: the server's own.",
    )
    package_environment: tuple[str, ...] = Field(
        (),
        description="Names of the server's environment variables that the processes of packages get, such as keys "
        "of their judges. They get no other.",
    )
    package_list_timeout_s: float = Field(
        600.0,
        gt=0,
        description="Time for a package to list its tasks at the start; then the server does not start.",
    )


class AgentSettings(Section):
    """The agents that the server launches."""

    specs: tuple[Path | str, ...] = Field(
        (),
        description="Folders of further agent specs (`*.yaml`), and specs in installed packages "
        "(`package.module:object`). A spec with the name of an agent that ships replaces it.",
    )
    install_dir: Path | None = Field(
        None,
        description="Folder of installed agents, not mounted noexec; none: `turnstile/agents` in the user's cache "
        "folder.",
    )
    install_timeout_s: float = Field(900.0, gt=0, description="Time to install one agent.")


CodeTarget = Annotated[str, Field(pattern=r"^.+:[A-Za-z_]\w*$")]


class GradingSettings(BoundedSection):
    """The grading of the agents' work."""

    parallel: int | None = Field(
        None,
        ge=1,
        description="Episodes graded at once; further ones wait. None: two for each core that the server may use, "
        "because a light grading waits half of its time. Lower it where tests are long and their time-outs tight.",
    )
    timeout_s: float = Field(
        7200.0,
        gt=0,
        description="Time for one grading, including its sandbox. After it the reward is 0 if the work was in the "
        "sandbox, unless something outside ended that; else there is none. The untouched task that a script or "
        "row of SWE-bench has to judge as well has as much for itself.",
    )
    attempts: int = Field(2, ge=1, description="Attempts at a grading that the infrastructure fails.")
    retries: int = Field(
        2, ge=0, description="Further tries of a grader that failed with one of `retry_errors`; then no reward."
    )
    retry_errors: tuple[str, ...] = Field(
        ("grader_unavailable",),
        description="Types of errors after which a grader is asked again. Sandboxes have `attempts`.",
    )
    max_changed_files: int = Field(
        5_000, ge=1, description="Files that a work may add, change or delete; a work with more scores 0."
    )
    functions: dict[str, CodeTarget] = Field(
        default_factory=dict,
        description="Python functions and OpenEnv rubrics as graders, by name: `module:name` or `file.py:name` "
        "([code](grading.md#python-functions)).",
    )
    python: Path | None = Field(
        None,
        description="The Python that runs functions and rubrics, with the packages that they import, such as "
        "`openenv`; none: the server's own.",
    )
    judges: dict[str, JudgeSettings] = Field(
        default_factory=dict,
        description="Language models that judge works, by name ([judges](grading.md#a-judge)).",
    )
    judge_cache_mb: int = Field(
        64, ge=0, description="MiB of judges' verdicts that are kept in the data directory; 0: none."
    )
    leak_search_s: float = Field(
        120.0,
        gt=0,
        description="`turnstile tasks validate`: time to look for the solution in what an agent can read.",
    )
    package_start_timeout_s: float = Field(
        180.0,
        gt=0,
        description="Time for the process of a package to be ready; swebench's imports take 2 to 11 s.",
    )
    package_timeout_s: float = Field(
        300.0, gt=0, description="Time for a package to score one work; then its process is ended: no reward."
    )
    resource_server_timeout_s: float = Field(
        300.0,
        gt=0,
        description="Time for a NeMo-Gym resource server to verify one work "
        "([how](task-sources.md#rows-that-a-resource-server-verifies)), and to open a session for an agent; "
        "then there is no reward.",
    )

    @property
    def places(self) -> int:
        """``parallel``, or its default on this machine."""
        return self.parallel or default_gradings(machine_resources())
