"""What a scripted policy says: steps by task and turn. Pure data and one decision, nothing runs here.

A script file is YAML or JSON, a list of plays:

    - instruction: One test of this repository fails     # found in the prompt; the longest one found wins
      steps:                                             # one per model call
        - {tool: bash, arguments: {command: ls}, text: Let me look.}
        - {text: Done.}

A play is for agents that offer every tool its steps call, so one task may have a play per kind of agent.
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
    """The script cannot be read, or not be said in this model's format."""


class Play(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    instruction: str = Field(min_length=1)
    steps: tuple[Step, ...] = Field(min_length=1)

    @property
    def tools(self) -> frozenset[str]:
        return frozenset(use.tool for step in self.steps for use in step.tool_uses)


Policy = Callable[[PolicyInput], Step | None]
"""What is said in a scene; None leaves the call to the model."""

THE_END = Step(text="Done.")
"""Said to an agent that goes on after the last step."""

_PLAYS: TypeAdapter[tuple[Play, ...]] = TypeAdapter(tuple[Play, ...])


class Script:
    """A ``Policy``. Of several plays that fit, the first one with the longest instruction is followed."""

    def __init__(self, plays: tuple[Play, ...]) -> None:
        self.plays = plays

    def __call__(self, scene: PolicyInput) -> Step | None:
        fitting = [
            play for play in self.plays if play.instruction in scene.prompt and play.tools <= scene.tools.keys()
        ]
        if not fitting:
            return None
        play = max(fitting, key=lambda one: len(one.instruction))
        return play.steps[scene.turn] if scene.turn < len(play.steps) else THE_END


def load_script(path: Path) -> Script:
    """Raises ScriptError, naming the file and the field."""
    try:
        text = path.read_text("utf-8")
        return Script(_PLAYS.validate_python(json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)))
    except (OSError, ValueError, yaml.YAMLError) as error:
        if isinstance(error, ValidationError):
            faults = "; ".join(f"{'.'.join(map(str, fault['loc']))}: {fault['msg']}" for fault in error.errors())
            raise ScriptError(f"{path}: {faults}") from error
        raise ScriptError(f"{path}: {error}") from error
