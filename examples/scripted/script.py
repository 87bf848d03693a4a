"""Scripts: the replies of a scripted policy, by task and turn. Pure data and one decision; nothing is run.

A script file is YAML or JSON, a list of plays:

    - instruction: One test of this repository fails     # a text in the prompt; the longest one wins
      steps:                                             # one per model call
        - {tool: bash, arguments: {command: ls}, text: Let me look.}
        - {text: Done.}

A play fits agents that offer every tool that its steps call, so a task may have a play per kind of agent.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import yaml
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from turnstile_server.testing.policy import PolicyInput, Step

__all__ = ["THE_END", "Play", "Policy", "PolicyInput", "Script", "ScriptError", "Step", "load_script"]


class ScriptError(Exception):
    """The script cannot be read, or a task has no known solution to make one from."""


class Play(BaseModel):
    """The replies to one task. A step is one model call."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    instruction: str = Field(min_length=1)
    steps: tuple[Step, ...] = Field(min_length=1)

    @property
    def tools(self) -> frozenset[str]:
        return frozenset(use.tool for step in self.steps for use in step.tool_uses)


Policy = Callable[[PolicyInput], Step | None]
"""Gives the reply to one call; None leaves the call to the model."""

THE_END = Step(text="Done.")
"""The reply to an agent that continues after the last step."""

_PLAYS: TypeAdapter[tuple[Play, ...]] = TypeAdapter(tuple[Play, ...])


class Script:
    """A ``Policy`` of plays. Of several plays that fit, the first with the longest instruction is followed."""

    def __init__(self, plays: tuple[Play, ...]) -> None:
        self.plays = plays

    def __call__(self, call: PolicyInput) -> Step | None:
        fitting = [
            play for play in self.plays if play.instruction in call.prompt and play.tools <= call.tools.keys()
        ]
        if not fitting:
            return None
        play = max(fitting, key=lambda one: len(one.instruction))
        return play.steps[call.turn] if call.turn < len(play.steps) else THE_END


def load_script(path: Path) -> Script:
    """Read a script file. Raises ScriptError, naming the file and the field."""
    try:
        text = path.read_text("utf-8")
        return Script(_PLAYS.validate_python(json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)))
    except (OSError, ValueError, yaml.YAMLError) as error:
        if isinstance(error, ValidationError):
            faults = "; ".join(f"{'.'.join(map(str, fault['loc']))}: {fault['msg']}" for fault in error.errors())
            raise ScriptError(f"{path}: {faults}") from error
        raise ScriptError(f"{path}: {error}") from error
