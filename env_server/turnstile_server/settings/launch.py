"""Settings of an engine that the server starts itself: ``turnstile serve --engine sglang --launch``."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, field_validator, model_validator

from turnstile_server.settings.section import BoundedSection

OWN_VARIABLES = "TURNSTILE_"
"""Variables that begin so are the server's own, its keys among them."""

PORTS = 65_535


class LaunchSettings(BoundedSection):
    """An engine that the server starts, restarts and ends itself."""

    enabled: bool = Field(
        False, description="Whether the server starts the engine (`--launch`); false: it attaches to `engine.url`."
    )
    python: str | None = Field(
        None,
        description="Python of the environment in which the engine is installed; none: the server's own. Its "
        "folder comes first in the engine's `PATH`.",
    )
    arguments: tuple[str, ...] = Field(
        (), description="Further arguments of the engine; on the command line they follow `--`."
    )
    environment: dict[str, str] = Field(
        default_factory=dict, description="Variables of the engine's environment, over those that it gets anyway."
    )
    inherit: tuple[str, ...] = Field(
        (
            *("PATH", "HOME", "USER", "LANG", "LC_ALL", "TZ", "TMPDIR", "LD_LIBRARY_PATH", "XDG_CACHE_HOME"),
            *("HF_HOME", "OMP_NUM_THREADS", "CUDA_*", "NVIDIA_*", "NCCL_*", "GLOO_*", "ROCR_*", "HIP_*"),
        ),
        description="Variables that the engine gets from the server's own environment, `*` at an end for all that "
        "begin so. It gets no others, and none that begins with `TURNSTILE_`.",
    )
    devices: tuple[str, ...] = Field(
        (), description='`CUDA_VISIBLE_DEVICES` of each replica, e.g. `["0,1", "2,3"]`; empty: the server\'s own.'
    )
    replicas: int = Field(1, ge=1, le=64, description="Engines on this machine, each with a port of its own.")
    port: int = Field(
        0,
        ge=0,
        le=PORTS,
        description="Port of the first replica on 127.0.0.1; the next ones follow. 0: free ports, new ones after "
        "each restart.",
    )
    metrics: bool = Field(
        True,
        description="`sglang`: start it with `--enable-metrics`, which needs its package `prometheus_client`.",
    )
    restart: Literal["never", "on_failure", "always"] = Field(
        "always",
        description="When an engine that has ended by itself is started again. `on_failure`: unless its exit code "
        "was 0, which is what vLLM gives when its engine core was killed.",
    )
    max_restarts: int = Field(
        5, ge=0, description="Restarts within 15 minutes; when one more is needed the engine is given up."
    )
    stop_grace_s: float = Field(
        5.0, ge=0, description="Time to end after SIGTERM; then SIGKILL for the engine and all its processes."
    )

    @field_validator("inherit")
    @classmethod
    def _inherit_no_key(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        for name in names:
            start = name.removesuffix("*")
            if "*" in start or not start:
                raise ValueError(f"{name!r} names too much: a name, or the beginning of names before one *")
            if start.startswith(OWN_VARIABLES) or (name != start and OWN_VARIABLES.startswith(start)):
                raise ValueError(f"{name!r} would give the engine the server's own settings, its keys among them")
        return names

    @field_validator("environment")
    @classmethod
    def _set_no_key(cls, variables: dict[str, str]) -> dict[str, str]:
        for name, value in variables.items():
            if not name or "=" in name or "\0" in name + value:
                raise ValueError(f"{name!r} is no variable that a process can have")
            if name.startswith(OWN_VARIABLES):
                raise ValueError(f"{name}: variables that begin with {OWN_VARIABLES} are the server's own")
        return variables

    @model_validator(mode="after")
    def _agree(self) -> Self:
        if self.devices and len(self.devices) != self.replicas:
            raise ValueError(
                f"launch.devices has {len(self.devices)} entries for {self.replicas} replicas: give one for each"
            )
        if self.port and self.port + self.replicas - 1 > PORTS:
            raise ValueError(f"launch.port {self.port} leaves no ports for {self.replicas} replicas")
        return self
