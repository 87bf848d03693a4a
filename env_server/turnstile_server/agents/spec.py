"""An agent as data: what to install, what to put where, what to run, how it ends. One file per agent.

Strings may hold placeholders, filled per episode: ``{model_url}`` (with the dialect's base path, e.g. ``/v1``,
added by the spec), ``{tool_url}``, ``{episode_key}``, ``{instruction}``, ``{instruction_file}``, ``{workdir}``,
``{home}`` (writable, empty), ``{install}`` (the agent's read-only install folder), ``{max_turns}``. A doubled
brace is a brace.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from turnstile.models.ids import ClientId


class Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Install(Part):
    """Packages put once into a folder that every sandbox mounts read-only."""

    pip: tuple[str, ...] = Field((), description="Pinned requirements, installed into `{install}/python`.")
    tree: str | None = Field(None, description="Folder, relative to the spec, copied to `{install}/files`.")


class Threads(Part):
    """Request headers in which the agent names the conversation that a call belongs to."""

    name: str | None = Field(None, description="Header with the agent's id of the conversation.")
    parent: str | None = Field(None, description="Header with its id of the conversation that started this one.")


class AgentSpec(Part):
    name: ClientId
    version: str = Field(description="The version that was tried.")
    summary: str
    install: Install = Install()
    dialect: Literal["chat", "anthropic", "responses", "gemini"] = "chat"
    threads: Threads = Threads()
    command: tuple[str, ...] = Field(description="argv; `python3` is the sandbox's.")
    env: dict[str, str] = Field(default_factory=dict)
    files: dict[str, str] = Field(default_factory=dict, description="Text by absolute path, written before start.")
    success: tuple[int, ...] = Field((0,), description="Exit codes of an agent that did what it could.")
    ends_on_submit: bool = Field(False, description="A submission ends the episode; else the agent's exit does.")
    uses_tools: bool = Field(False, description="Whether it speaks to the tool door.")
