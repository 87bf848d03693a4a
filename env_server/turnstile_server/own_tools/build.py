"""From what the settings or a task say to the sources of tools. Refuses what cannot work, naming the place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import anyio

from turnstile_server.errors import StartupError, TurnstileError
from turnstile_server.own_tools.host import HostFunctions
from turnstile_server.own_tools.http_streams import http_headers
from turnstile_server.own_tools.in_sandbox import SandboxFunction, SandboxFunctions
from turnstile_server.own_tools.load import load_function
from turnstile_server.own_tools.mounted import MountedTools, StartTask
from turnstile_server.own_tools.names import NamedTool, name_problem
from turnstile_server.own_tools.signature import FunctionSignature, UnusableFunction
from turnstile_server.own_tools.stdio import MissingVariable, environment
from turnstile_server.own_tools.threads import ToolThreads
from turnstile_server.settings import ToolSettings
from turnstile_server.settings.own_tools import ALL, FunctionSpec, OwnToolSpecs, ServerSpec, Where
from turnstile_server.tools.protocol import OwnTools, ToolSpec


@dataclass(frozen=True, slots=True)
class BuiltTools:
    """The tools of one place: of the settings, or of a task."""

    sources_of_functions: tuple[OwnTools, ...]
    functions: tuple[ToolSpec, ...]
    mounted: tuple[MountedTools, ...]
    function_names: tuple[NamedTool, ...]
    allowed_names: tuple[NamedTool, ...]
    """The names of mounted tools, as far as ``allow`` lists them."""
    in_sandbox: bool
    """Some functions run in the sandbox."""

    @property
    def sources(self) -> tuple[OwnTools, ...]:
        return (*self.sources_of_functions, *self.mounted)

    @property
    def names(self) -> tuple[NamedTool, ...]:
        """Those that are known before any server was started."""
        return (*self.function_names, *self.allowed_names)


@dataclass(frozen=True, slots=True)
class Workshop:
    """The parts that own tools are built with. ``fault``: the error of an episode whose mounted server cannot be
    started."""

    threads: ToolThreads
    settings: ToolSettings
    start_shared: StartTask
    fault: type[TurnstileError]


def build_tools(place: str, specs: OwnToolSpecs, taken: Sequence[NamedTool], workshop: Workshop) -> BuiltTools:
    """The tools of one place; their paths are absolute. ``taken``: names that they stand beside.

    Raises StartupError for a function or server that cannot be used, and for a name that is reserved or taken.
    """
    settings = workshop.settings
    host: list[FunctionSignature] = []
    inside: list[SandboxFunction] = []
    names: list[NamedTool] = []
    for function in specs.functions:
        here = f"{place}: function {function.function}"
        try:
            where, signature = _signature(function, settings)
            if where is Where.HOST:
                host.append(signature)
            else:
                inside.append(SandboxFunction(signature, settings))
        except UnusableFunction as error:
            raise StartupError(f"{here} cannot be a tool: {error}") from error
        names.append(NamedTool(signature.spec.name, here))
    mounted: list[MountedTools] = []
    allowed: list[NamedTool] = []
    for server in specs.servers:
        here = f"{place}: MCP server {server.name}"
        _check_server(server, here, settings)
        mounted.append(MountedTools(server, place, settings, workshop.fault, workshop.start_shared))
        allowed += (NamedTool(server.prefix + name, here) for name in server.allow if name != ALL)
    _check_names([*names, *allowed], taken)
    functions: list[OwnTools] = []
    if host:
        functions.append(HostFunctions(place, host, workshop.threads, settings))
    if inside:
        functions.append(SandboxFunctions(place, inside))
    specs_of_functions = (*(one.spec for one in host), *(one.spec for one in inside))
    return BuiltTools(
        tuple(functions), specs_of_functions, tuple(mounted), tuple(names), tuple(allowed), bool(inside)
    )


async def mounted_specs(built: BuiltTools, taken: Sequence[NamedTool]) -> Mapping[NamedTool, ToolSpec]:
    """The mounted tools, by starting every server; those that are shared are left running.

    Raises StartupError for a server that cannot be started, and for a name that is reserved or taken.
    """
    found: list[Sequence[ToolSpec]] = [()] * len(built.mounted)
    failed: list[TurnstileError] = []

    async def ask(number: int, mounted: MountedTools) -> None:
        try:
            found[number] = await mounted.specs()
        except TurnstileError as error:
            failed.append(error)

    async with anyio.create_task_group() as tasks:
        for number, mounted in enumerate(built.mounted):
            tasks.start_soon(ask, number, mounted)
    if failed:
        raise StartupError("\n".join(error.message for error in failed))
    named = [
        (NamedTool(spec.name, mounted.place), spec)
        for mounted, specs in zip(built.mounted, found, strict=True)
        for spec in specs
    ]
    _check_names([*built.function_names, *(name for name, _ in named)], taken)
    return dict(named)


def _check_names(names: Sequence[NamedTool], taken: Sequence[NamedTool]) -> None:
    problem = name_problem(names, taken)
    if problem is not None:
        raise StartupError(f"These tools cannot be used: {problem}")


def _signature(spec: FunctionSpec, settings: ToolSettings) -> tuple[Where, FunctionSignature]:
    function, where = load_function(spec)
    signature = FunctionSignature(function, name=spec.name, timeout_s=spec.timeout_s)
    problem = _too_long(signature.spec.timeout_s, settings)
    if problem is not None:
        raise UnusableFunction(problem)
    return where, signature


def _check_server(spec: ServerSpec, here: str, settings: ToolSettings) -> None:
    """Whatever can be known without starting it. Raises StartupError."""
    try:
        environment(spec)
        http_headers(spec)
    except MissingVariable as error:
        raise StartupError(f"{here} cannot be mounted: {error}") from error
    problem = _too_long(spec.timeout_s, settings)
    if problem is not None:
        raise StartupError(f"{here} cannot be mounted: {problem}")


def _too_long(asked: float | None, settings: ToolSettings) -> str | None:
    most = settings.own_max_timeout_s
    if asked is None or asked <= most:
        return None
    return f"its timeout_s is {asked:g}, above this server's ceiling of {most:g} (tools.own_max_timeout_s)"
