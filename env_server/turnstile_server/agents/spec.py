"""An agent as data: what to install, what to put where, what to run, how it ends. One file per agent.

Strings may hold placeholders, filled per episode: ``{model_url}`` (with the dialect's base path, e.g. ``/v1``,
added by the spec), ``{tool_url}``, ``{episode_key}``, ``{instruction}``, ``{instruction_file}``, ``{workdir}``,
``{home}`` (writable, empty), ``{install}`` (the agent's read-only install folder), ``{node}`` (the binary of
Node.js, there where ``install.npm`` is used), ``{arch}`` (``x64`` or ``arm64``), ``{machine}`` (``x86_64`` or
``aarch64``), ``{max_turns}``. A doubled brace is a brace.
"""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from turnstile.models.base import ClientId
from turnstile_server.gate.dialects.router import dialect_names

_PIN = re.compile(r"(@[a-z0-9~-][a-z0-9._~-]*/)?[a-z0-9~-][a-z0-9._~-]*@\d+\.\d+\.\d+(-[0-9A-Za-z.-]+)?")


def _pinned(package: str) -> str:
    if not _PIN.fullmatch(package.replace("{arch}", "x64")):
        raise ValueError(f"{package!r} is not a package at one version, as in @scope/name@1.2.3")
    return package


def _known_dialect(name: str) -> str:
    if name not in dialect_names():
        raise ValueError(f"{name!r} is not a dialect of the model API: {', '.join(dialect_names())}")
    return name


NpmPackage = Annotated[str, AfterValidator(_pinned)]


class Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Install(Part):
    """Packages put once into a folder that every sandbox mounts read-only."""

    pip: tuple[str, ...] = Field((), description="Pinned requirements, installed into `{install}/python`.")
    npm: tuple[NpmPackage, ...] = Field(
        (),
        description="Packages of the npm registry, `name@1.2.3`, into `{install}/node/node_modules`; their "
        "scripts are not run. `{arch}` in a name is filled.",
    )
    tree: str | None = Field(None, description="Folder, relative to the spec, copied to `{install}/files`.")


class Threads(Part):
    """Request headers in which the agent names the conversation that a call belongs to."""

    name: str | None = Field(None, description="Header with the agent's id of the conversation.")
    parent: str | None = Field(None, description="Header with its id of the conversation that started this one.")


class Resources(Part):
    """What the agent itself needs of its sandbox; the sandbox gets at least this, whatever its task asks."""

    memory_mb: int | None = Field(None, ge=16)
    pids: int | None = Field(None, ge=8, description="Processes and threads.")


Scalar = str | int | float | bool | None


def _pattern(pattern: str) -> str:
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(f"{pattern!r} is no regular expression: {error}") from error
    return pattern


class Match(Part):
    match: Annotated[str, AfterValidator(_pattern)] = Field(
        description="Regular expression (Python's), found anywhere in a text."
    )


class EndRule(Part):
    """What an event of the agent's own log says about its end: where its exit code does not."""

    last: dict[str, Scalar | Match] = Field(
        min_length=1,
        description="Fields (`a.b`: b in a; `a.0`: first of a) and values by which the event is known; the last "
        "such event counts.",
    )
    when: dict[str, Scalar | Match] = Field(
        default_factory=dict,
        description="Fields and values that it must have for the rule to apply; null: null, or not there.",
    )
    means: Literal["failed", "done"] = Field(description="`done`: graded, whatever the exit code.")
    reason: str | None = Field(None, description="The field that says why.")


class AgentSpec(Part):
    name: ClientId
    version: str = Field(description="The version that was tried.")
    summary: str
    install: Install = Install()
    dialect: Annotated[str, AfterValidator(_known_dialect)] = "chat"
    threads: Threads = Threads()
    resources: Resources = Resources()
    needs: tuple[str, ...] = Field((), description="What the image must have, as Debian packages; told in errors.")
    command: tuple[str, ...] = Field(description="argv; `python3` is the sandbox's.")
    stdin: str = Field("", description="Its standard input.")
    env: dict[str, str] = Field(default_factory=dict)
    files: dict[str, str] = Field(default_factory=dict, description="Text by absolute path, written before start.")
    success: tuple[int, ...] = Field((0,), description="Exit codes of an agent that did what it could.")
    end: tuple[EndRule, ...] = Field(
        (), description="Rules on the JSON lines of its standard output; the first that applies beats `success`."
    )
    ends_on_submit: bool = Field(False, description="A submission ends the episode; else the agent's exit does.")
    uses_tools: bool = Field(False, description="Whether it speaks to the tool door.")
    offers_tools: bool | None = Field(
        True,
        description="Whether it offers the model tools, of its own or the tool door's; false: it works by its "
        "replies' text; null: up to the episode.",
    )
