"""The declaration of own tools: in the settings (``tools``), or in a task (``tools:``)."""

from __future__ import annotations

import re
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from turnstile_server.settings.section import Section

ALL = "*"
"""In ``allow``: every tool that the server has."""

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


class Where(StrEnum):
    """The place where a tool runs."""

    HOST = "host"
    """In the server's process, or beside it: with the server's own rights."""
    SANDBOX = "sandbox"
    """In the episode's sandbox, as the agent's user."""


def _variable(entry: str) -> str:
    if not _VARIABLE.fullmatch(entry.partition("=")[0]):
        raise ValueError(f"{entry!r} is neither NAME (passed on from the server) nor NAME=value")
    return entry


class FunctionSpec(Section):
    """A Python function as a tool."""

    function: str = Field(
        pattern=r"^.+:[A-Za-z_]\w*$",
        description="`module:function`, or `path/to/file.py:function`. A path is relative to the task file, in "
        "the settings to the working directory.",
    )
    where: Where | None = Field(
        None, description="`host` or `sandbox`. It must be said, here or by the decorator `@tool(where=…)`."
    )
    name: str | None = Field(None, description="Name of the tool; none: that of the function.")
    timeout_s: float | None = Field(
        None,
        gt=0,
        description="Time for one call, at most `tools.own_max_timeout_s`; none: `tools.own_timeout_s`.",
    )

    def below(self, folder: Path) -> FunctionSpec:
        place, _, name = self.function.rpartition(":")
        return self.model_copy(update={"function": f"{folder / place}:{name}"}) if place.endswith(".py") else self


class ServerSpec(Section):
    """An MCP server whose tools episodes get: a command (stdio), or a URL (streamable HTTP)."""

    name: str = Field(pattern=r"^[A-Za-z0-9_-]{1,64}$", description="Name in messages and logs.")
    command: str | None = Field(None, description="Program to start; it speaks MCP over stdin and stdout.")
    args: tuple[str, ...] = Field((), description="Its arguments.")
    env: tuple[Annotated[str, AfterValidator(_variable)], ...] = Field(
        (),
        description="Its environment, and nothing else but PATH: `NAME=value`, or `NAME` to pass on the server's "
        "own.",
    )
    cwd: Path | None = Field(
        None, description="Its working directory, relative as a `function`'s path is; none: where that starts."
    )
    where: Where | None = Field(None, description="A `command` must say `host`: it runs beside the server.")
    url: str | None = Field(None, pattern=r"^https?://", description="Address of a server that runs elsewhere.")
    headers: dict[str, str] = Field(
        default_factory=dict,
        description="`url`: HTTP headers, each by the name of the environment variable that holds its value.",
    )
    allow: tuple[str, ...] = Field(
        min_length=1, description="Names of the tools that are mounted, as the server has them; `*` for all."
    )
    prefix: str = Field("", pattern=r"^[A-Za-z0-9_-]{0,32}$", description="Put before the name of each tool.")
    scope: Literal["episode", "shared"] = Field(
        "episode", description="`episode`: started for each episode and ended with it. `shared`: one for all."
    )
    restart: bool | None = Field(
        None, description="Start it again after it died; none: only where it is shared, as its state is lost."
    )
    start_timeout_s: float | None = Field(
        None, gt=0, description="Time until it has named its tools; none: `tools.mount_start_timeout_s`."
    )
    timeout_s: float | None = Field(
        None,
        gt=0,
        description="Time for one call, at most `tools.own_max_timeout_s`; none: `tools.own_timeout_s`.",
    )

    def below(self, folder: Path) -> ServerSpec:
        if self.command is None:
            return self
        return self.model_copy(update={"cwd": folder / (self.cwd or "")})

    @property
    def restarts(self) -> bool:
        return self.scope == "shared" if self.restart is None else self.restart

    @model_validator(mode="after")
    def _one_kind(self) -> Self:
        if (self.command is None) == (self.url is None):
            raise ValueError(f"MCP server {self.name!r} needs either `command` or `url`")
        if self.url is not None and (self.args or self.env or self.cwd or self.where):
            raise ValueError(f"MCP server {self.name!r} has a `url`: args, env, cwd and where are for a `command`")
        if self.command is not None and self.headers:
            raise ValueError(f"MCP server {self.name!r} has a `command`: headers are for a `url`")
        if self.command is not None and self.where is not Where.HOST:
            said = "where: sandbox is for functions only" if self.where else "it does not say where it runs"
            raise ValueError(
                f"MCP server {self.name!r}: {said}; a mounted server runs beside Turnstile: say `where: host`"
            )
        if ALL in self.allow and len(self.allow) > 1:
            raise ValueError(f"MCP server {self.name!r}: `*` in `allow` stands for all tools; name no others")
        return self


class OwnToolSpecs(Section):
    """The tools of one place: of the server's settings, or of a task."""

    functions: tuple[FunctionSpec, ...] = Field((), description="Python functions as tools.")
    servers: tuple[ServerSpec, ...] = Field((), description="MCP servers that are mounted.")

    def __bool__(self) -> bool:
        return bool(self.functions or self.servers)

    def below(self, folder: Path) -> OwnToolSpecs:
        """The same with every path absolute: relative ones start in ``folder``, and so do commands."""
        return OwnToolSpecs(
            functions=tuple(spec.below(folder) for spec in self.functions),
            servers=tuple(spec.below(folder) for spec in self.servers),
        )
