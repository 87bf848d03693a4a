"""The tools of a task's resource server (NeMo-Gym), each call in the one session of the episode."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

from turnstile_server.errors import TaskFailed, ToolsUnavailable
from turnstile_server.kinds.resource_server.session import ResourceServerProblem, ResourceSession, open_session
from turnstile_server.tools.protocol import EpisodeTools, Progress, ServedTool, ToolResult, ToolSpec


class ResourceTools:
    """Implements OwnTools. ``row``: what the session is opened with; ``timeout_s``: until it is open;
    ``max_bytes``: of the calls and their answers."""

    def __init__(
        self, url: str, row: Mapping[str, Any], specs: Sequence[ToolSpec], timeout_s: float, max_bytes: int
    ) -> None:
        self.place = f"resource server {url}"
        self.session: ResourceSession | None = None
        """Open from ``open`` on, until its block is left."""
        self._url = url
        self._row = row
        self._specs = specs
        self._timeout_s = timeout_s
        self._max_bytes = max_bytes

    @asynccontextmanager
    async def open(self, episode: EpisodeTools) -> AsyncIterator[Sequence[ServedTool]]:
        """See ``OwnTools``. Raises ToolsUnavailable, TaskFailed."""
        try:
            async with open_session(self._url, self._row, self._timeout_s, self._max_bytes) as session:
                self.session = session
                yield [_ResourceTool(spec, session) for spec in self._specs]
        except ResourceServerProblem as error:
            raise (ToolsUnavailable if error.passing else TaskFailed)(str(error)) from error
        finally:
            self.session = None


class _ResourceTool:
    """Implements ServedTool."""

    def __init__(self, spec: ToolSpec, session: ResourceSession) -> None:
        self.spec = spec
        self._session = session

    async def call(self, episode: EpisodeTools, arguments: Mapping[str, Any], progress: Progress) -> ToolResult:
        try:
            said, failed = await self._session.call(self.spec.name, arguments)
        except ResourceServerProblem as error:
            return ToolResult(str(error), is_error=True)
        return ToolResult(said, is_error=failed)
