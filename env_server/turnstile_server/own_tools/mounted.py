"""Mounted MCP servers as sources of tools: one for each episode, or one that all episodes share.

Owner of the shared ones: they are started at the server's start (a task's: at its first episode) and ended with
it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import anyio
import mcp_types as mcp

from turnstile_server.errors import TurnstileError
from turnstile_server.own_tools.bounds import OwnToolBounds
from turnstile_server.own_tools.mounted_server import MountedServer, MountFailed
from turnstile_server.settings import ToolSettings
from turnstile_server.settings.own_tools import ServerSpec
from turnstile_server.tools.protocol import EpisodeTools, Progress, ServedTool, ToolResult, ToolSpec

_END_GRACES = 5
"""Ending a process takes at most four times ``mount_grace_s``; after five the rest is cancelled."""


StartTask = Callable[[Callable[..., Coroutine[Any, Any, None]]], Awaitable[Any]]
"""``TaskGroup.start`` of the group that outlives the episodes."""


class MountedTools:
    """The tools of a mounted server. Implements OwnTools.

    ``fault``: the error of an episode whose server cannot be started. ``start_shared``: starts the task of a
    server that all episodes share.
    """

    def __init__(
        self,
        spec: ServerSpec,
        place: str,
        settings: ToolSettings,
        fault: type[TurnstileError],
        start_shared: StartTask,
    ) -> None:
        self.place = f"{place}: MCP server {spec.name}"
        self.shared = spec.scope == "shared"
        self._spec = spec
        self._said_in = place
        self._settings = settings
        self._bounds = settings.bounds_of(OwnToolBounds)
        self._fault = fault
        self._start_shared = start_shared
        self._starting = anyio.Lock()
        self._server: MountedServer | None = None
        """The shared one, once it was started."""

    @asynccontextmanager
    async def open(self, episode: EpisodeTools) -> AsyncIterator[Sequence[ServedTool]]:
        if self.shared:
            yield await self._shared_tools()
            return
        async with self._own_tools() as tools:
            yield tools

    @asynccontextmanager
    async def _own_tools(self) -> AsyncIterator[Sequence[MountedTool]]:
        """The tools of a server of its own, which leaving the block ends. Raises the fault."""
        failure: MountFailed | None = None
        async with anyio.create_task_group() as tasks:
            server = MountedServer(self._spec, self._said_in, self._settings)
            try:
                await tasks.start(server.run)
            except MountFailed as error:
                failure = error
            else:
                try:
                    yield self._tools(server)
                finally:
                    server.stop()
                    tasks.cancel_scope.deadline = anyio.current_time() + _END_GRACES * self._bounds.mount_grace_s
        if failure is not None:
            raise self._fault(str(failure)) from failure

    async def _shared_tools(self) -> Sequence[MountedTool]:
        """Starts the shared server, if it was not yet; waits for one that is being started again. Raises the
        fault."""
        async with self._starting:
            if self._server is None:
                server = MountedServer(self._spec, self._said_in, self._settings)
                try:
                    await self._start_shared(server.run)
                except MountFailed as error:
                    raise self._fault(str(error)) from error
                self._server = server
        wait_s = self._spec.start_timeout_s or self._settings.mount_start_timeout_s
        with anyio.move_on_after(wait_s):
            await self._server.up.wait()
        if not self._server.up.is_set():
            raise self._fault(f"{self.place} is not running, and did not come back within {wait_s:g} s")
        return self._tools(self._server)

    async def specs(self) -> Sequence[ToolSpec]:
        """Its tools: starts the server to ask it, and ends it again unless it is shared. Raises the fault."""
        if self.shared:
            tools = await self._shared_tools()
        else:
            async with self._own_tools() as tools:
                pass
        return [tool.spec for tool in tools]

    def end(self) -> None:
        """Has the shared server end."""
        if self._server is not None:
            self._server.stop()

    def _tools(self, server: MountedServer) -> Sequence[MountedTool]:
        return [MountedTool(tool, server, self._spec) for tool in server.tools]


class MountedTool:
    """A tool of a mounted server. Implements ServedTool."""

    def __init__(self, tool: mcp.Tool, server: MountedServer, spec: ServerSpec) -> None:
        self._name = tool.name
        self._server = server
        self._spec = ToolSpec(
            spec.prefix + tool.name,
            tool.description or "",
            tool.input_schema,
            title=tool.title,
            output_schema=tool.output_schema,
            annotations=tool.annotations,
            timeout_s=spec.timeout_s,
        )

    @property
    def spec(self) -> ToolSpec:
        return self._spec

    async def call(self, episode: EpisodeTools, arguments: Mapping[str, Any], progress: Progress) -> ToolResult:
        return await self._server.call(self._name, arguments, progress)
