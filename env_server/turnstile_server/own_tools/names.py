"""Names of own tools: what is refused, and how both places are named when two tools have one name. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

RESERVED = frozenset({"reset", "step", "state", "close"})
"""Simulation controls of OpenEnv. An agent that could call one would control its own episode, so no tool may have
such a name, in any case of its letters (https://github.com/meta-pytorch/OpenEnv, RFC 003)."""

BUILT_IN = ("bash", "read_file", "write_file", "edit_file", "submit")

_SHAPE = re.compile(r"[A-Za-z0-9_-]{1,64}")
"""The names that every model API accepts for a function."""


@dataclass(frozen=True, slots=True)
class NamedTool:
    """The name of a tool, with its prefix, and where it is defined: words for an error message."""

    name: str
    place: str


BUILT_IN_TOOLS = tuple(NamedTool(name, "Turnstile's built-in tools") for name in BUILT_IN)


def name_problem(tools: Iterable[NamedTool], taken: Iterable[NamedTool] = BUILT_IN_TOOLS) -> str | None:
    """The first thing that is wrong with the names of ``tools``, which stand beside ``taken``; else None."""
    places = {tool.name: tool.place for tool in taken}
    for tool in tools:
        if tool.name.casefold() in RESERVED:
            return (
                f"{tool.place}: {tool.name!r} is a simulation control of OpenEnv ({', '.join(sorted(RESERVED))}); "
                "no tool may have its name: choose another, or a prefix"
            )
        if not _SHAPE.fullmatch(tool.name):
            return (
                f"{tool.place}: {tool.name!r} is no name that model APIs accept (letters, digits, _ and -, at "
                "most 64): choose another"
            )
        if tool.name in places:
            return f"two tools are named {tool.name!r}: one of {places[tool.name]}, one of {tool.place}"
        places[tool.name] = tool.place
    return None
