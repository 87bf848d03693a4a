"""All own tools of the server: those of its settings, and those of its tasks, built and checked when it starts.

What must hold: a name that is reserved or taken is refused before any episode could see it, and the message names
both places (a task's server that is mounted with all its tools names them only to the task's first episode). A
task's tools stand beside the server's. No mounted server outlives the block that the catalog is entered for.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio
from anyio.abc import TaskGroup

from turnstile_server.errors import StartupError, TaskFailed, ToolsUnavailable, TurnstileError
from turnstile_server.own_tools.bounds import OwnToolBounds
from turnstile_server.own_tools.names import BUILT_IN_TOOLS, NamedTool, name_problem
from turnstile_server.own_tools.threads import ToolThreads
from turnstile_server.settings import ToolSettings
from turnstile_server.settings.own_tools import OwnToolSpecs
from turnstile_server.tools.protocol import OwnTools, ToolSpec

if TYPE_CHECKING:
    from turnstile_server.own_tools.build import BuiltTools


class OwnToolCatalog:
    """Raises StartupError for settings that cannot be used. Entered as an async context manager, it checks the
    mounted servers of the settings and owns those that are shared."""

    def __init__(self, settings: ToolSettings) -> None:
        self._settings = settings
        self._bounds = settings.bounds_of(OwnToolBounds)
        self._threads = ToolThreads(settings)
        self._shared: TaskGroup | None = None
        specs = OwnToolSpecs(functions=settings.functions, servers=settings.servers)
        self._server = self._built("the settings", specs.below(Path.cwd()), (), ToolsUnavailable)
        self._mounted: tuple[ToolSpec, ...] = ()
        """The tools of the settings' mounted servers, once those were asked."""
        self._tasks: dict[str, BuiltTools] = {}

    def add_task(self, task_id: str, specs: OwnToolSpecs) -> None:
        """Builds the tools of a task; its paths are absolute. Raises StartupError."""
        built = self._built(f"task {task_id}", specs, self.server_names, TaskFailed)
        if built is not None:
            self._tasks[task_id] = built

    async def __aenter__(self) -> OwnToolCatalog:
        """Starts the mounted servers of the settings once. Raises StartupError."""
        self._shared = anyio.create_task_group()
        await self._shared.__aenter__()
        try:
            await self._check_mounted()
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._shared is not None
        for built in (self._server, *self._tasks.values()):
            for mounted in () if built is None else built.mounted:
                mounted.end()
        # What does not end in time is cancelled, which kills its process group.
        self._shared.cancel_scope.shield = True
        self._shared.cancel_scope.deadline = anyio.current_time() + 2 * self._bounds.mount_grace_s
        await self._shared.__aexit__(None, None, None)

    @property
    def server_names(self) -> tuple[NamedTool, ...]:
        """Names of the tools of the server's settings, which every episode has."""
        return () if self._server is None else self._server.names

    @property
    def server_specs(self) -> tuple[ToolSpec, ...]:
        """The tools of the server's settings; those of mounted servers from the entering of the catalog on."""
        return () if self._server is None else (*self._server.functions, *self._mounted)

    def of(self, task_id: str) -> tuple[OwnTools, ...]:
        """The sources of the own tools of an episode of this task; the server's for a task that has none."""
        built = (self._server, self._tasks.get(task_id))
        return tuple(source for tools in built if tools is not None for source in tools.sources)

    def needs_sandbox(self, task_id: str) -> bool:
        """The task has tools that run in the sandbox, so its episodes have one. (The server's alone make none:
        like the built-in tools, they are there where there is a sandbox.)"""
        built = self._tasks.get(task_id)
        return built is not None and built.in_sandbox

    @property
    def stuck_threads(self) -> int:
        """Calls that outlived their time and still run."""
        return self._threads.stuck

    def _built(
        self, place: str, specs: OwnToolSpecs, beside: Sequence[NamedTool], fault: type[TurnstileError]
    ) -> BuiltTools | None:
        if not specs:
            return None
        # Imported where there are own tools: it imports the MCP client and the SDK's reading of functions.
        from turnstile_server.own_tools.build import Workshop, build_tools  # noqa: PLC0415

        workshop = Workshop(self._threads, self._settings, self._start_shared, fault)
        return build_tools(place, specs, (*BUILT_IN_TOOLS, *beside), workshop)

    async def _check_mounted(self) -> None:
        if self._server is None or not self._server.mounted:
            return
        from turnstile_server.own_tools.build import mounted_specs  # noqa: PLC0415 - as above

        mounted = await mounted_specs(self._server, BUILT_IN_TOOLS)
        self._mounted = tuple(mounted.values())
        names = (*self._server.function_names, *mounted)
        for built in self._tasks.values():
            problem = name_problem(built.names, (*BUILT_IN_TOOLS, *names))
            if problem is not None:
                raise StartupError(f"These tools cannot be used: {problem}")

    async def _start_shared(self, run: Callable[..., Coroutine[Any, Any, None]]) -> Any:
        if self._shared is None:
            raise ToolsUnavailable("shared MCP servers are started by a running server only")
        return await self._shared.start(run)
