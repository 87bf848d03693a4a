"""Sandboxes that say how much memory was used in them, and a door through which all their agents are heard."""

from __future__ import annotations

import anyio
from starlette.types import ASGIApp

from agents_matrix.tape import Microphone
from turnstile_server.errors import TurnstileError
from turnstile_server.sandboxes.protocol import (
    Command,
    ExecResult,
    Process,
    Sandbox,
    SandboxProvider,
    SandboxSpec,
    User,
)

PEAK = Command(
    argv=(
        *("sh", "-c"),
        "cat /sys/fs/cgroup/memory.peak 2>/dev/null || cat /sys/fs/cgroup/memory/memory.max_usage_in_bytes",
    ),
    cwd="/",
    timeout_s=5.0,
)
"""Linux's cgroups, version 2 (from 5.19 on) or 1: bytes, page cache included. Elsewhere nothing is known."""
ASK_S = 10.0


class GaugedProvider:
    def __init__(self, provider: SandboxProvider) -> None:
        self._provider = provider
        self._microphone: Microphone | None = None
        self.peaks: dict[str, int] = {}
        """Bytes by episode."""

    @property
    def microphone(self) -> Microphone:
        """At the door, once it is started."""
        assert self._microphone is not None
        return self._microphone

    @property
    def name(self) -> str:
        return self._provider.name

    @property
    def isolated(self) -> bool:
        return self._provider.isolated

    @property
    def missing(self) -> str | None:
        return self._provider.missing

    async def start(self, agent_door: ASGIApp) -> None:
        self._microphone = Microphone(agent_door)
        await self._provider.start(self._microphone)

    async def create(self, spec: SandboxSpec) -> Sandbox:
        return GaugedSandbox(await self._provider.create(spec), self.peaks)

    async def close(self) -> None:
        await self._provider.close()


class GaugedSandbox:
    """Asks for the peak just before it is destroyed."""

    def __init__(self, sandbox: Sandbox, peaks: dict[str, int]) -> None:
        self._sandbox = sandbox
        self._peaks = peaks
        self._episode_id: str | None = None

    @property
    def sandbox_id(self) -> str:
        return self._sandbox.sandbox_id

    @property
    def workdir(self) -> str:
        return self._sandbox.workdir

    @property
    def agent_door(self) -> str | None:
        return self._sandbox.agent_door

    def admit(self, episode_id: str | None) -> None:
        self._episode_id = episode_id or self._episode_id
        self._sandbox.admit(episode_id)

    async def exec(self, command: Command) -> ExecResult:
        return await self._sandbox.exec(command)

    async def start(self, command: Command) -> Process:
        return await self._sandbox.start(command)

    async def read(self, path: str, max_bytes: int) -> bytes:
        return await self._sandbox.read(path, max_bytes)

    async def write(self, path: str, data: bytes, *, mode: int | None = None) -> None:
        await self._sandbox.write(path, data, mode=mode)

    async def upload(self, archive: bytes, target: str, *, user: User = User.AGENT) -> None:
        await self._sandbox.upload(archive, target, user=user)

    async def download(self, path: str, max_bytes: int) -> bytes:
        return await self._sandbox.download(path, max_bytes)

    async def stop_all(self) -> None:
        await self._sandbox.stop_all()

    async def died(self) -> None:
        await self._sandbox.died()

    async def destroy(self) -> None:
        with anyio.move_on_after(ASK_S):
            await self._ask()
        await self._sandbox.destroy()

    async def _ask(self) -> None:
        if self._episode_id is None:
            return
        try:
            result = await self._sandbox.exec(PEAK)
        except TurnstileError:
            return  # it is dead already, and nobody will know
        text = result.stdout.decode().strip()
        if text.isdigit():
            self._peaks[self._episode_id] = int(text)
