"""The keys of Harbor's ``task.toml`` (schema 1.4 and older), their types, and what contradicts what.

What must hold: a key that is not in these tables is an error. Harbor ignores such a key, so a typo changes the
task without a word.
"""

from __future__ import annotations

import re
import unicodedata
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, field_validator, model_validator

from turnstile_server.tasks.script import EnvName

_SIZE = re.compile(r"(\d+(?:\.\d+)?)([GMK])", re.IGNORECASE)
_MIB = {"G": 1024.0, "M": 1.0, "K": 1 / 1024}
_NO_NAME = re.compile(r'[<>:"/\\|?*\x00-\x1f\x7f]')
_PACKAGE = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
NetworkMode = Literal["public", "no-network", "allowlist"]
Environment = dict[EnvName, str]
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class HarborTable(BaseModel):
    """A table of ``task.toml``; unknown keys are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class HarborNetwork(HarborTable):
    """The keys of a network policy. ``network_mode`` None: that of the environment, there public."""

    network_mode: NetworkMode | None = None
    allowed_hosts: list[str] | None = None

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.allowed_hosts is not None and self.network_mode != "allowlist":
            raise ValueError('`allowed_hosts` needs network_mode = "allowlist"')
        return self


class HarborAuthor(HarborTable):
    """An author of a task."""

    name: str
    email: str | None = None


class HarborPackage(HarborTable):
    """``[task]``: what a registry knows of it."""

    name: str
    version: str | None = Field(None, min_length=1)
    description: str = ""
    authors: list[HarborAuthor] = []
    keywords: list[str] = []

    @field_validator("name")
    @classmethod
    def _has_an_organisation(cls, name: str) -> str:
        if not _PACKAGE.fullmatch(name) or ".." in name:
            raise ValueError(f"{name!r} is not `organisation/name`")
        return name


class HarborAgent(HarborNetwork):
    """``[agent]``."""

    timeout_sec: Seconds | None = None
    user: str | int | None = None


class HarborHealthcheck(HarborTable):
    """``[environment.healthcheck]``."""

    command: str
    interval_sec: float = 5.0
    timeout_sec: float = 30.0
    start_period_sec: float = 0.0
    start_interval_sec: float = 5.0
    retries: int = 3


class HarborMcpServer(HarborTable):
    """``[[environment.mcp_servers]]``."""

    name: str
    transport: Literal["stdio", "sse", "streamable-http", "http"] = "sse"
    url: str | None = None
    command: str | None = None
    args: list[str] = []
    headers: dict[str, str] = {}


class HarborTpu(HarborTable):
    """``[environment.tpu]``."""

    type: str
    topology: str


class HarborEnvironment(HarborNetwork):
    """``[environment]``."""

    build_timeout_sec: Seconds = 600.0
    docker_image: str | None = Field(None, min_length=1)
    os: Annotated[str, Field(pattern=r"(?i)^(linux|windows)$")] = "linux"
    cpus: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    memory_mb: int | None = Field(None, gt=0)
    storage_mb: int | None = Field(None, gt=0)
    gpus: int | None = Field(None, ge=0)
    gpu_types: list[str] | None = None
    tpu: HarborTpu | None = None
    mcp_servers: list[HarborMcpServer] = []
    env: Environment = {}
    skills_dir: str | None = None
    healthcheck: HarborHealthcheck | None = None
    workdir: str | None = None
    memory: str | None = Field(None, description="Deprecated form of `memory_mb`.")
    storage: str | None = Field(None, description="Deprecated form of `storage_mb`.")
    allow_internet: bool | None = Field(None, description="Deprecated form of `network_mode`.")

    @field_validator("memory", "storage")
    @classmethod
    def _is_a_size(cls, text: str | None) -> str | None:
        if text is not None and _SIZE.fullmatch(text.strip()) is None:
            raise ValueError(f"{text!r} is not a size like 2G, 512M or 900K; write the key with _mb")
        return text

    @field_validator("workdir")
    @classmethod
    def _below_the_root(cls, path: str | None) -> str | None:
        if path is not None and (not path.startswith("/") or not path.strip("/")):
            raise ValueError(f"{path!r} is no folder below /, by its whole path")
        return path

    @model_validator(mode="after")
    def _one_size(self) -> Self:
        for old, new in (("memory", "memory_mb"), ("storage", "storage_mb")):
            text, mib = self.model_dump()[old], self.model_dump()[new]
            if text is not None and mib is not None and _mib(text) != mib:
                raise ValueError(f"{old} = {text!r} ({_mib(text)} MiB) contradicts {new} = {mib}")
        return self

    @property
    def memory_mib(self) -> int | None:
        return _mib(self.memory) if self.memory_mb is None and self.memory is not None else self.memory_mb

    @property
    def storage_mib(self) -> int | None:
        return _mib(self.storage) if self.storage_mb is None and self.storage is not None else self.storage_mb

    @property
    def network(self) -> NetworkMode:
        if self.network_mode is not None:
            return self.network_mode
        return "no-network" if self.allow_internet is False else "public"


def _mib(size: str) -> int:
    """``2G`` as 2048."""
    found = _SIZE.fullmatch(size.strip())
    assert found is not None  # else its field is refused
    return int(float(found[1]) * _MIB[found[2].upper()])


class HarborCollect(HarborTable):
    """``[[verifier.collect]]``."""

    command: str
    service: str = "main"
    timeout_sec: float = 60.0
    user: str | int | None = None


class HarborVerifier(HarborNetwork):
    """``[verifier]``."""

    timeout_sec: Seconds = 600.0
    env: Environment = {}
    user: str | int | None = None
    environment_mode: Literal["shared", "separate"] | None = None
    environment: HarborEnvironment | None = None
    collect: list[HarborCollect] = []

    @model_validator(mode="after")
    def _one_mode(self) -> Self:
        if self.environment_mode == "shared" and self.environment is not None:
            raise ValueError('environment_mode = "shared" contradicts [verifier.environment]')
        return self

    @property
    def separate(self) -> bool:
        return self.environment_mode == "separate" or self.environment is not None


class HarborArtifact(HarborTable):
    """An item of ``artifacts``."""

    source: str
    destination: str | None = None
    exclude: list[str] = []
    service: str | None = None


class HarborStep(HarborTable):
    """``[[steps]]``."""

    name: str
    agent: HarborAgent = HarborAgent()
    verifier: HarborVerifier = HarborVerifier()
    min_reward: FiniteFloat | dict[str, FiniteFloat] | None = None
    healthcheck: HarborHealthcheck | None = None
    artifacts: list[str | HarborArtifact] = []

    @field_validator("name")
    @classmethod
    def _is_a_folder_name(cls, name: str) -> str:
        if not name.strip() or _NO_NAME.search(name) or name.endswith((".", " ")) or len(name.encode()) > 255:
            raise ValueError(f"{name!r} is no name of a folder that every system takes")
        return name


class HarborSolution(HarborTable):
    """``[solution]``."""

    env: Environment = {}


class HarborConfig(HarborTable):
    """The whole file."""

    schema_version: str = "1.4"
    version: str | None = Field(None, description="Deprecated form of `schema_version`.")
    source: str | None = None
    task: HarborPackage | None = None
    metadata: dict[str, Any] = {}
    agent: HarborAgent = HarborAgent()
    verifier: HarborVerifier = HarborVerifier()
    environment: HarborEnvironment = HarborEnvironment()
    solution: HarborSolution = HarborSolution()
    artifacts: list[str | HarborArtifact] = []
    multi_step_reward_strategy: Literal["mean", "final"] | None = None
    steps: list[HarborStep] = []

    @field_validator("steps")
    @classmethod
    def _own_names(cls, steps: list[HarborStep]) -> list[HarborStep]:
        names = [unicodedata.normalize("NFC", step.name).casefold() for step in steps]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"two steps are called {twice[0]!r}")
        return steps

    @model_validator(mode="after")
    def _strategy_of_steps(self) -> Self:
        if self.multi_step_reward_strategy is not None and not self.steps:
            raise ValueError("`multi_step_reward_strategy` needs [[steps]]")
        return self

    def artifact_sources(self, step: HarborStep | None) -> tuple[str, ...]:
        """Artifact paths of a step: the task's and its own."""
        both = (*self.artifacts, *(() if step is None else step.artifacts))
        return tuple(each if isinstance(each, str) else each.source for each in both)
