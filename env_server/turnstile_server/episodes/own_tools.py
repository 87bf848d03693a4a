"""The own tools of one episode: opened when it is prepared, released when it ends.

A task of its own holds what the tools need (processes, connections, environments), because their context managers
must be entered and left in one task, while the preparation may be cancelled and the owner task releases them.
``close`` releases them on every path: after the grading, which may look at what they hold.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from typing import Any

import anyio
from anyio.abc import TaskGroup, TaskStatus

from turnstile_server.errors import Gone, TaskFailed
from turnstile_server.own_tools.names import NamedTool, name_problem
from turnstile_server.tools.protocol import EpisodeTools, OwnTools, Progress, ServedTool, ToolResult, ToolSpec

_LOG = logging.getLogger(__name__)


class EpisodeOwnTools:
    """``sources``: where the tools come from, in the order in which they are listed; None is no source."""

    def __init__(self, sources: Sequence[OwnTools | None]) -> None:
        self._sources = tuple(source for source in sources if source is not None)
        self._tools: tuple[ServedTool, ...] = ()
        self._release = anyio.Event()
        self._released = anyio.Event()
        self._calls: set[anyio.CancelScope] = set()
        self._no_calls = anyio.Event()
        self._held = False
        self._stopped = False

    @property
    def tools(self) -> tuple[ServedTool, ...]:
        """Empty before ``open`` and after ``stop_calls``."""
        return () if self._stopped else self._tools

    def __bool__(self) -> bool:
        """True if there are any sources."""
        return bool(self._sources)

    async def open(self, episode: EpisodeTools, tasks: TaskGroup) -> None:
        """Opens every source, in a task of ``tasks``. Cancelling it releases what was opened. Raises what they
        raise."""
        if self._sources:
            await tasks.start(self._hold, episode)

    async def _hold(self, episode: EpisodeTools, *, task_status: TaskStatus[None]) -> None:
        self._held = True
        refused: Exception | None = None
        try:
            async with AsyncExitStack() as stack:
                try:
                    self._tools = await self._opened(episode, stack)
                except Exception as error:  # noqa: BLE001 - raised below: a task group in the stack would wrap it
                    refused = error
                else:
                    task_status.started()
                    await self._release.wait()
        except Exception:  # noqa: BLE001 - the boundary to a user's code: what cannot be put away ends no episode
            _LOG.exception("own tools could not be released", extra={"episode_id": episode.episode_id})
        finally:
            self._released.set()
        if refused is not None:
            raise refused

    async def _opened(self, episode: EpisodeTools, stack: AsyncExitStack) -> tuple[ServedTool, ...]:
        found: list[ServedTool] = []
        named: list[NamedTool] = []
        for source in self._sources:
            opened = await stack.enter_async_context(source.open(episode))
            found += opened
            named += (NamedTool(tool.spec.name, source.place) for tool in opened)
        problem = name_problem(named)  # most were checked at the start; some servers name their tools only now
        if problem is not None:
            raise TaskFailed(f"these tools cannot be used: {problem}")
        return tuple(_StoppableTool(tool, self) for tool in found)

    async def run_call(
        self, tool: ServedTool, episode: EpisodeTools, arguments: Mapping[str, Any], progress: Progress
    ) -> ToolResult:
        """Calls a tool until ``stop_calls``; then raises Gone."""
        if not self._stopped:
            with anyio.CancelScope() as scope:
                self._calls.add(scope)
                try:
                    return await tool.call(episode, arguments, progress)
                finally:
                    self._calls.discard(scope)
                    if self._stopped and not self._calls:
                        self._no_calls.set()
        raise Gone("the episode has ended; its tools are gone")

    async def stop_calls(self) -> None:
        """Cancels the running calls, waits for their end, and admits no more. May be repeated."""
        self._stopped = True
        for scope in self._calls:
            scope.cancel()
        if self._calls:
            await self._no_calls.wait()

    async def close(self) -> None:
        """Releases what the tools hold, and returns when it is released. May be repeated."""
        await self.stop_calls()
        self._release.set()
        if self._held:
            await self._released.wait()


class _StoppableTool:
    """A tool whose calls end with the episode, whoever called it."""

    def __init__(self, tool: ServedTool, calls: EpisodeOwnTools) -> None:
        self._tool = tool
        self._calls = calls

    @property
    def spec(self) -> ToolSpec:
        return self._tool.spec

    async def call(self, episode: EpisodeTools, arguments: Mapping[str, Any], progress: Progress) -> ToolResult:
        return await self._calls.run_call(self._tool, episode, arguments, progress)
