"""The fields of an agent's spec: what to install, which files to write, what to run, how it ends.

Texts may hold placeholders, which ``launch`` fills per episode: ``{model_url}`` (the spec adds the dialect's base
path, e.g. ``/v1``), ``{tool_url}``, ``{episode_key}``, ``{instruction}``, ``{instruction_file}``, ``{workdir}``,
``{home}`` (writable, empty), ``{install}`` (the agent's read-only install folder), ``{node}`` (the binary of
Node.js, for specs with ``install.npm``), ``{python}`` (the interpreter for the agent's own program: the carried
runtime's, else the sandbox's ``python3``), ``{ca_file}`` (certificates, for programs that do not start without),
``{arch}`` (``x64`` or ``arm64``), ``{machine}`` (``x86_64`` or ``aarch64``), ``{max_turns}``. A doubled brace is
a brace.
"""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from turnstile.models.base import ClientId
from turnstile.plugins import UnknownPlugin
from turnstile_server.capture.volatile import check_patterns
from turnstile_server.gate.dialects.registry import DIALECTS

_PIN = re.compile(r"(@[a-z0-9~-][a-z0-9._~-]*/)?[a-z0-9~-][a-z0-9._~-]*@\d+\.\d+\.\d+(-[0-9A-Za-z.-]+)?")


def _pinned(package: str) -> str:
    if not _PIN.fullmatch(package.replace("{arch}", "x64")):
        raise ValueError(f"{package!r} is not a package at one version, as in @scope/name@1.2.3")
    return package


def _known_dialect(name: str) -> str:
    try:
        DIALECTS.find(name)
    except UnknownPlugin as error:
        raise ValueError(str(error)) from None
    return name


NpmPackage = Annotated[str, AfterValidator(_pinned)]


class SpecPart(BaseModel):
    """A part of a spec: immutable, and an unknown field is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Install(SpecPart):
    """Packages and files that are installed once, into a folder that every sandbox mounts read-only."""

    pip: tuple[str, ...] = Field((), description="Pinned requirements, installed into `{install}/python`.")
    npm: tuple[NpmPackage, ...] = Field(
        (),
        description="Packages of the npm registry, `name@1.2.3`, into `{install}/node/node_modules`; their "
        "scripts are not run. `{arch}` in a name is filled.",
    )
    tree: str | None = Field(None, description="Folder, relative to the spec, copied to `{install}/files`.")


class ThreadHeaders(SpecPart):
    """Request headers in which the agent names the conversation that a call belongs to."""

    name: str | None = Field(None, description="Header with the agent's id of the conversation.")
    parent: str | None = Field(None, description="Header with its id of the conversation that started this one.")


class AgentResources(SpecPart):
    """The agent's own minimum resources. Its sandbox gets at least these, even if its task asks for less."""

    memory_mb: int | None = Field(None, ge=16)
    pids: int | None = Field(None, ge=8, description="Processes and threads.")


Scalar = str | int | float | bool | None


def _pattern(pattern: str) -> str:
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(f"{pattern!r} is not a regular expression: {error}") from error
    return pattern


class TextPattern(SpecPart):
    """A value of an end rule that is found in a text, not equal to it."""

    match: Annotated[str, AfterValidator(_pattern)] = Field(
        description="Regular expression (Python's), found anywhere in a text."
    )


class EndRule(SpecPart):
    """Says by an event of the agent's own log how the agent ended, where its exit code does not."""

    last: dict[str, Scalar | TextPattern] = Field(
        min_length=1,
        description="Fields (`a.b`: b in a; `a.0`: first of a) and values by which the event is known; the last "
        "such event counts.",
    )
    when: dict[str, Scalar | TextPattern] = Field(
        default_factory=dict,
        description="Fields and values that it must have for the rule to apply; null: null, or not there.",
    )
    means: Literal["failed", "done"] = Field(description="`done`: graded, whatever the exit code.")
    reason: str | None = Field(None, description="The field that says why.")


class Resume(SpecPart):
    """The way the agent goes on from its own session files. It keeps them in its home, so a snapshot has them."""

    without: tuple[str, ...] = Field(
        (),
        description="Arguments of `command` by which it keeps no session: left out in episodes that keep a "
        "snapshot of every turn.",
    )
    arguments: tuple[str, ...] = Field(
        min_length=1,
        description="Added to `command` in a fork: it goes on with its latest session; the instruction is what it "
        "is told then.",
    )
    settle_s: float = Field(
        0.0,
        ge=0,
        description="Seconds from a model call until the agent's session files have all that came before it; the "
        "snapshot is taken then.",
    )


def _volatile(patterns: tuple[str, ...]) -> tuple[str, ...]:
    check_patterns(patterns)
    return patterns


class AgentSpec(SpecPart):
    """One agent that the server can launch."""

    name: ClientId
    extends: ClientId | None = Field(
        None,
        description="An agent whose fields this spec takes over where it names none: mappings (`env`, `files`, "
        "`install`) are joined by key, any other value replaces. Both share one installation.",
    )
    version: str = Field(description="The version that was tried.")
    summary: str
    install: Install = Install()
    dialect: Annotated[str, AfterValidator(_known_dialect)] = "chat"
    threads: ThreadHeaders = ThreadHeaders()
    resources: AgentResources = AgentResources()
    needs: tuple[str, ...] = Field(
        (),
        description="Debian packages that an image must have, where sandboxes run on its Python "
        "(`sandboxes.docker_python`); errors name them.",
    )
    programs: tuple[str, ...] = Field(
        (), description="Programs that the agent starts by name: an image without one is refused."
    )
    command: tuple[str, ...] = Field(
        description="argv. `{python}` runs a program of the agent's own; `python3` is the image's."
    )
    stdin: str = Field("", description="Standard input of the command.")
    env: dict[str, str] = Field(default_factory=dict)
    files: dict[str, str] = Field(default_factory=dict, description="Text by absolute path, written before start.")
    success: tuple[int, ...] = Field((0,), description="Exit codes after which the work is graded.")
    end: tuple[EndRule, ...] = Field(
        (), description="Rules on the JSON lines of its standard output; the first that applies beats `success`."
    )
    ends_on_submit: bool = Field(False, description="A submission ends the episode; else the agent's exit does.")
    resume: Resume | None = Field(
        None, description="How a fork of it goes on; none: it cannot be forked. For agents of `user: agent` alone."
    )
    user: Literal["harness", "agent"] = Field(
        "agent",
        description="User that it runs as. `agent`: it can run the model's commands and edit the work folder "
        "itself; its key is then within reach of these commands. `harness`: it works through the MCP endpoint "
        "alone, reads the work folder and cannot write it, and its key is out of their reach.",
    )
    launches: Literal["agent"] | None = Field(
        None,
        description="`agent`: it starts its model's commands itself, by the launcher, as the user `agent`. "
        "`{install}/files/turnstile_launch.py` is how; `user` is then `harness`.",
    )
    uses_tools: bool = Field(False, description="Whether it uses the MCP endpoint.")
    plain_tools: bool = Field(
        False,
        description="It shows its model what the MCP endpoint says beside text (structured results, "
        "instructions), so it gets text alone.",
    )
    volatile: Annotated[tuple[str, ...], AfterValidator(_volatile)] = Field(
        (),
        description="Regular expressions for the parts of its system and developer messages that change from "
        "call to call without meaning (a date, a counter): such a change does not break the conversation.",
    )
    offers_tools: bool | None = Field(
        True,
        description="Whether it offers the model tools, its own or the MCP endpoint's; false: it works by the "
        "text of replies; null: up to the episode.",
    )

    @model_validator(mode="after")
    def _apart(self) -> AgentSpec:
        if self.launches is not None and self.user != "harness":
            raise ValueError("launches: agent is for an agent with user: harness, which the spec must say")
        if self.resume is not None and (unknown := set(self.resume.without).difference(self.command)):
            raise ValueError(f"resume.without: command has no argument {', '.join(sorted(unknown))}")
        return self

    @property
    def can_resume(self) -> bool:
        """Its episodes can be forked. Only the home of the user ``agent`` is in a snapshot."""
        return self.resume is not None and self.user == "agent"
