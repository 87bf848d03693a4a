"""From what the settings or a task say to the sources of tools. Refuses what cannot work, naming the place."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from turnstile_server.errors import StartupError
from turnstile_server.own_tools.host import HostFunctions
from turnstile_server.own_tools.in_sandbox import SandboxFunction, SandboxFunctions
from turnstile_server.own_tools.load import load_function
from turnstile_server.own_tools.names import NamedTool, name_problem
from turnstile_server.own_tools.signature import FunctionSignature, UnusableFunction
from turnstile_server.own_tools.threads import ToolThreads
from turnstile_server.settings import ToolSettings
from turnstile_server.settings.own_tools import FunctionSpec, OwnToolSpecs, Where
from turnstile_server.tools.protocol import OwnTools


@dataclass(frozen=True, slots=True)
class BuiltTools:
    """The tools of one place: of the settings, or of a task."""

    sources: tuple[OwnTools, ...]
    names: tuple[NamedTool, ...]
    """Those that are known before an episode."""
    in_sandbox: bool
    """Some of them run in the sandbox."""


def build_tools(
    place: str, specs: OwnToolSpecs, taken: Sequence[NamedTool], threads: ToolThreads, settings: ToolSettings
) -> BuiltTools:
    """The tools of one place; their paths are absolute. ``taken``: names that they stand beside.

    Raises StartupError for a function that cannot be a tool, and for a name that is reserved or taken.
    """
    host: list[FunctionSignature] = []
    inside: list[SandboxFunction] = []
    names: list[NamedTool] = []
    for spec in specs.functions:
        here = f"{place}: function {spec.function}"
        try:
            function, where = load_function(spec)
            signature = _signature(spec, function, settings)
            if where is Where.HOST:
                host.append(signature)
            else:
                inside.append(SandboxFunction(signature, settings))
        except UnusableFunction as error:
            raise StartupError(f"{here} cannot be a tool: {error}") from error
        names.append(NamedTool(signature.spec.name, here))
    problem = name_problem(names, taken)
    if problem is not None:
        raise StartupError(f"These tools cannot be used: {problem}")
    sources: list[OwnTools] = []
    if host:
        sources.append(HostFunctions(place, host, threads, settings))
    if inside:
        sources.append(SandboxFunctions(place, inside))
    return BuiltTools(tuple(sources), tuple(names), bool(inside))


def _signature(spec: FunctionSpec, function: Callable[..., Any], settings: ToolSettings) -> FunctionSignature:
    signature = FunctionSignature(function, name=spec.name, timeout_s=spec.timeout_s)
    asked, most = signature.spec.timeout_s, settings.own_max_timeout_s
    if asked is not None and asked > most:
        raise UnusableFunction(
            f"its timeout_s is {asked:g}, above this server's ceiling of {most:g} (tools.own_max_timeout_s)"
        )
    return signature
