"""A sandbox that tells its pool when it is destroyed; in everything else the sandbox it stands for."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeAlias

from turnstile_server.sandboxes.protocol import Command, ExecResult, Process, Sandbox, User

End: TypeAlias = Callable[["PooledSandbox", Sandbox], asyncio.Task[None]]


class PooledSandbox:
    """``end`` destroys the sandbox; it is called once, and every call of ``destroy`` waits for it."""

    def __init__(self, sandbox: Sandbox, end: End) -> None:
        self._sandbox = sandbox
        self._end = end
        self._ending: asyncio.Task[None] | None = None

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
        if self._ending is None:
            self._ending = self._end(self, self._sandbox)
        await asyncio.shield(self._ending)
