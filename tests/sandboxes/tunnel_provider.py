"""A backend by stream in its smallest form: the helper is a process of this machine, spoken to by two pipes.

It stands for a backend elsewhere and proves the seam: it mounts no socket, serves no HTTP and knows no agent app.
bubblewrap gives each process a ``/run`` of its own, and isolates nothing.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Awaitable, Callable
from tempfile import TemporaryDirectory

import anyio
from anyio.abc import Process
from anyio.streams.stapled import StapledByteStream

from turnstile_server.errors import SandboxDeath
from turnstile_server.sandboxes.background import BackgroundTasks
from turnstile_server.sandboxes.helper import HELPER_FOLDER, SOCKET_TARGET
from turnstile_server.sandboxes.helper_sandbox import HelperSandbox, Layout
from turnstile_server.sandboxes.protocol import ImageFacts, ProviderSetup, SandboxSpec, User
from turnstile_server.sandboxes.stream_provider import HostEnd, HostFacts, StreamProvider, helper_command

BUBBLEWRAP = (
    "bwrap",
    "--dev-bind",
    "/",
    "/",
    "--unshare-pid",
    "--proc",
    "/proc",
    "--as-pid-1",
    "--tmpfs",
    "/run",
)


class TunnelHost:
    warm = False

    def __init__(self, process: Process, folder: TemporaryDirectory[str]) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self.stream = StapledByteStream(process.stdin, process.stdout)
        self._process = process
        self._folder = folder

    def layout(self, facts: HostFacts) -> Layout:
        own = self._folder.name
        return Layout(
            workdir=f"{own}/workspace",
            path=facts.environment["PATH"],
            homes={user: f"{own}/{user}" for user in User},
            temporary=f"{own}/tmp",
            filtered=False,
            forward_port=0,
        )

    async def died(self) -> HostEnd:
        return HostEnd(SandboxDeath.OUTSIDE, f"exit code {await self._process.wait()}")

    async def destroy(self) -> None:
        if self._process.returncode is None:
            self._process.kill()
        await self._process.wait()
        self._folder.cleanup()


class TunnelBackend:
    name = "tunnel"
    isolated = False
    description = "tunnel: a process on this machine, without isolation"
    carries_runtime = False

    async def start(self, tasks: BackgroundTasks, make: Callable[[SandboxSpec], Awaitable[HelperSandbox]]) -> None:
        """There is nothing to check, and nothing of it outlives its server."""

    async def create(self, sandbox_id: str, spec: SandboxSpec) -> TunnelHost:
        command = [*BUBBLEWRAP, "--dir", SOCKET_TARGET, *helper_command(sys.executable, str(HELPER_FOLDER))]
        process = await anyio.open_process(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=None)
        return TunnelHost(process, TemporaryDirectory())

    async def image_facts(self, image: str | None) -> ImageFacts | None:
        return None

    async def close(self) -> None:
        """Every host was destroyed."""


def create(setup: ProviderSetup) -> StreamProvider:
    return StreamProvider(TunnelBackend(), setup)
