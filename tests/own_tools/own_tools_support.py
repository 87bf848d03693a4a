"""Own tools in front of stand-in episodes: tool files that a test writes, and calls through the toolbox."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from textwrap import dedent
from typing import Any

import anyio
from subprocess_sandbox import SubprocessSandbox
from tools_support import PlayedEpisode

from bounded import bounded
from turnstile_server.episodes.own_tools import EpisodeOwnTools
from turnstile_server.own_tools.catalog import OwnToolCatalog
from turnstile_server.settings import ToolSettings
from turnstile_server.settings.own_tools import OwnToolSpecs
from turnstile_server.tools.protocol import NO_PROGRESS, Progress, ToolResult
from turnstile_server.tools.toolbox import Toolbox

HEAD = "from turnstile_server.own_tools import ToolContext, tool\n"


def tool_file(folder: Path, text: str, name: str = "own.py") -> Path:
    """A file of tools. Each test has a folder of its own, so the file is imported anew."""
    path = folder / name
    path.write_text(HEAD + dedent(text))
    return path


class OwnEpisode:
    """An episode with own tools that runs until the test leaves the block of ``own_episode``."""

    def __init__(self, episode: PlayedEpisode, toolbox: Toolbox, own: EpisodeOwnTools) -> None:
        self.episode = episode
        self.toolbox = toolbox
        self.own = own

    @property
    def names(self) -> list[str]:
        return [tool.name for tool in self.toolbox.tools_of(self.episode)]

    async def __call__(
        self, name: str, arguments: Mapping[str, Any] | None = None, progress: Progress = NO_PROGRESS, **more: Any
    ) -> ToolResult:
        return await self.toolbox.call(self.episode, name, {**(arguments or {}), **more}, progress)

    async def error(self, name: str, **arguments: Any) -> str:
        result = await self(name, **arguments)
        assert result.is_error, result.text
        return result.text


class OwnServer:
    """The part of a server that has to do with own tools. Several episodes may run at once."""

    def __init__(self, tasks: Mapping[str, Mapping[str, Any]] | None = None, **settings: Any) -> None:
        self.settings = bounded(ToolSettings, **settings)
        self.catalog = OwnToolCatalog(self.settings)
        for task_id, specs in (tasks or {}).items():
            self.catalog.add_task(task_id, OwnToolSpecs.model_validate(specs))
        self.toolbox = Toolbox(self.settings)

    @asynccontextmanager
    async def episode(
        self, episode_id: str = "e1", task: str = "t", sandbox: SubprocessSandbox | None = None
    ) -> AsyncIterator[OwnEpisode]:
        episode = PlayedEpisode(episode_id, sandbox)
        own = EpisodeOwnTools(self.catalog.of(task))
        failure: Exception | None = None
        async with anyio.create_task_group() as tasks:
            try:
                await own.open(episode, tasks)
                episode.own_tools = own.tools
                yield OwnEpisode(episode, self.toolbox, own)
            except Exception as error:  # noqa: BLE001 - raised below as it is; the task group would wrap it
                failure = error
            finally:
                with anyio.CancelScope(shield=True):
                    await own.close()
        if failure is not None:
            raise failure


def functions(path: Path, *names: str, **more: Any) -> list[dict[str, Any]]:
    return [{"function": f"{path}:{name}", **more} for name in names]
