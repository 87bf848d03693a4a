"""The transport to sandboxes of a Docker engine: found out at start, from what the engine sees.

``bind``: over Unix sockets of the server's that containers have mounted; the quickest, where the engine runs on
this machine and in this file system. ``stream``: over the engine's own connection; works wherever the engine is.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path

import anyio

from turnstile_server.errors import SandboxUnavailable, StartupError
from turnstile_server.sandboxes.docker.engine import DockerEngine
from turnstile_server.sandboxes.docker.inspected import Image
from turnstile_server.sandboxes.docker.runtime import ContainerRuntime
from turnstile_server.sandboxes.docker.server_files import ServerFiles

BIND, STREAM, AUTO = "bind", "stream", "auto"


@dataclass(frozen=True, slots=True)
class Choice:
    transport: str
    why: str


class EngineTransport:
    """``wanted``: ``sandboxes.docker_transport``. ``run_dir``: the server's folder of sockets, which exists."""

    def __init__(
        self, engine: DockerEngine, runtime: ContainerRuntime, files: ServerFiles, wanted: str, run_dir: Path
    ) -> None:
        self._engine = engine
        self._runtime = runtime
        self._files = files
        self._wanted = wanted
        self._run_dir = run_dir
        self._choice: Choice | None = None
        self._choosing = anyio.Lock()

    async def choose(self, image: Image) -> Choice:
        """The transport, tried once with a container of ``image``. Raises SandboxUnavailable where the engine does
        not answer, or the one that the settings name cannot work."""
        async with self._choosing:
            if self._choice is None:
                self._choice = await self._find(image)
            return self._choice

    async def _find(self, image: Image) -> Choice:
        kernel = await self._runtime.kernel(image)
        if self._wanted == STREAM:
            return Choice(STREAM, "sandboxes.docker_transport")
        blind = await self._why_blind(image)
        if blind is None and kernel.own and self._wanted != BIND:
            return Choice(STREAM, f"the runtime {self._runtime.name} has a kernel of its own")
        if blind is None:
            return Choice(BIND, "the engine sees this server's files")
        if self._wanted == BIND:
            raise SandboxUnavailable(
                f"sandboxes.docker_transport = bind cannot work: {blind}; set it to auto or stream"
            )
        return Choice(STREAM, blind)

    async def _why_blind(self, image: Image) -> str | None:
        """Reason why containers cannot use this server's sockets; None where they can."""
        theirs = await self._engine.kernel()
        if sys.platform != "linux" or theirs != os.uname().release:
            return f"the engine runs on another machine (kernel {theirs})"
        if not await self._files.sees(self._run_dir, image):
            return f"the engine does not see this server's {self._run_dir}"
        return None


def not_possible(error: SandboxUnavailable) -> StartupError:
    return StartupError(
        f"sandboxes in Docker are not possible: {error.message}. Start Docker, or name its address "
        "(sandboxes.docker_host, or DOCKER_HOST), or choose sandboxes.kind = local"
    )
