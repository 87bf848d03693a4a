"""A task's world, checked: its class, its parameters, its tools; and how a source names one.

Imports none of the code that reads functions as tools (``load`` does), because every server imports this.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from turnstile_server.kinds.worlds.world import World, defines

if TYPE_CHECKING:  # it takes the MCP SDK's server, half a second
    from turnstile_server.own_tools.signature import FunctionSignature

IN_MODULE = re.compile(r"(?P<module>[A-Za-z_]\w*(\.[A-Za-z_]\w*)*):(?P<name>[A-Za-z_]\w*)")
IN_FILE = re.compile(r"(?P<file>.+\.py)(:(?P<name>[A-Za-z_]\w*))?", re.DOTALL)


@dataclass(frozen=True, slots=True)
class WorldToolMethod:
    """A method that is a tool. ``signature`` is of the method as its callers see it, without ``self``."""

    method: str
    signature: FunctionSignature


@dataclass(frozen=True, slots=True)
class WorldDefinition:
    """The world of one task, checked. ``name``: where its class is, for messages."""

    world_class: type[World]
    name: str
    parameters: Mapping[str, Any]
    seed: int
    tools: tuple[WorldToolMethod, ...]

    @property
    def graded(self) -> bool:
        return defines(self.world_class, "grade")

    @property
    def talks(self) -> bool:
        """It plays a user who answers what the agent submits."""
        return defines(self.world_class, "respond")

    @property
    def closes(self) -> bool:
        return defines(self.world_class, "close")

    @property
    def solvable(self) -> bool:
        return defines(self.world_class, "solve")


def names_a_world(source: str) -> bool:
    """True if ``source`` has the form of a world's name. Nothing is imported."""
    return bool(IN_FILE.fullmatch(source) or IN_MODULE.fullmatch(source))


def file_of(source: str) -> Path | None:
    """The Python file that ``source`` names, without importing it; None where the module cannot be found."""
    match = IN_FILE.fullmatch(source)
    if match is not None:
        return Path(match["file"])
    match = IN_MODULE.fullmatch(source)
    assert match is not None
    loaded = sys.modules.get(match["module"])
    return Path(loaded.__file__) if loaded is not None and loaded.__file__ else None


def place_of(world_class: type[World]) -> tuple[str, int | None]:
    """File and line of the class."""
    try:
        return inspect.getsourcefile(world_class) or world_class.__module__, inspect.getsourcelines(world_class)[1]
    except (OSError, TypeError):  # made without a file
        return world_class.__module__, None


def name_of(world_class: type[World]) -> str:
    file, _ = place_of(world_class)
    return f"{Path(file).name}:{world_class.__name__}"
