"""All own tools of the server: those of its settings, and those of its tasks, built and checked when it starts.

What must hold: a name that is reserved or taken is refused before any episode could see it, and the message names
both places. A task's tools stand beside the server's.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from turnstile_server.own_tools.names import BUILT_IN_TOOLS, NamedTool
from turnstile_server.own_tools.threads import ToolThreads
from turnstile_server.settings import ToolSettings
from turnstile_server.settings.own_tools import OwnToolSpecs
from turnstile_server.tools.protocol import OwnTools

if TYPE_CHECKING:
    from turnstile_server.own_tools.build import BuiltTools


class OwnToolCatalog:
    """Raises StartupError for settings that cannot be used."""

    def __init__(self, settings: ToolSettings) -> None:
        self._settings = settings
        self._threads = ToolThreads(settings)
        specs = OwnToolSpecs(functions=settings.functions, servers=settings.servers)
        self._server = self._built("the settings", specs.below(Path.cwd()), ())
        self._tasks: dict[str, BuiltTools] = {}

    def add_task(self, task_id: str, specs: OwnToolSpecs) -> None:
        """Builds the tools of a task; its paths are absolute. Raises StartupError."""
        built = self._built(f"task {task_id}", specs, self.server_names)
        if built is not None:
            self._tasks[task_id] = built

    @property
    def server_names(self) -> tuple[NamedTool, ...]:
        """Names of the tools of the server's settings, which every episode has."""
        return () if self._server is None else self._server.names

    def of(self, task_id: str) -> tuple[OwnTools, ...]:
        """Where the own tools of an episode of this task come from; the server's for a task that has none."""
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

    def _built(self, place: str, specs: OwnToolSpecs, beside: Sequence[NamedTool]) -> BuiltTools | None:
        if not specs:
            return None
        # Imported where there are own tools: it imports the MCP client and the SDK's reading of functions.
        from turnstile_server.own_tools.build import build_tools  # noqa: PLC0415

        return build_tools(place, specs, (*BUILT_IN_TOOLS, *beside), self._threads, self._settings)
