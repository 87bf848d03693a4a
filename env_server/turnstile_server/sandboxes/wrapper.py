"""Bases for sandboxes and providers that stand for others: every call goes to the inner one.

A subclass overrides the calls that it changes. A new method of the protocols is added here once, so that no
wrapper can forget it.
"""

from __future__ import annotations

from turnstile_server.egress.log import NetworkLog
from turnstile_server.egress.policy import NetworkPhase
from turnstile_server.errors import SandboxDeath
from turnstile_server.sandboxes.protocol import (
    Command,
    ExecResult,
    ImageFacts,
    Process,
    Sandbox,
    SandboxOrigin,
    SandboxProvider,
    User,
)


class SandboxWrapper:
    """A ``Sandbox`` that passes every call to ``inner``."""

    def __init__(self, inner: Sandbox) -> None:
        self.inner = inner

    @property
    def sandbox_id(self) -> str:
        return self.inner.sandbox_id

    @property
    def origin(self) -> SandboxOrigin:
        return self.inner.origin

    @property
    def workdir(self) -> str:
        return self.inner.workdir

    @property
    def agent_url(self) -> str | None:
        return self.inner.agent_url

    @property
    def python(self) -> str:
        return self.inner.python

    @property
    def can_launch(self) -> bool:
        return self.inner.can_launch

    def admit(self, episode_id: str | None) -> None:
        self.inner.admit(episode_id)

    def enter_phase(self, phase: NetworkPhase | None, log: NetworkLog | None = None) -> None:
        self.inner.enter_phase(phase, log)

    async def exec(self, command: Command) -> ExecResult:
        return await self.inner.exec(command)

    async def start(self, command: Command) -> Process:
        return await self.inner.start(command)

    async def read(self, path: str, max_bytes: int) -> bytes:
        return await self.inner.read(path, max_bytes)

    async def write(self, path: str, data: bytes, *, mode: int | None = None, user: User = User.AGENT) -> None:
        await self.inner.write(path, data, mode=mode, user=user)

    async def upload(self, archive: bytes, target: str, *, user: User = User.AGENT) -> None:
        await self.inner.upload(archive, target, user=user)

    async def download(self, path: str, max_bytes: int) -> bytes:
        return await self.inner.download(path, max_bytes)

    async def stop_all(self) -> None:
        await self.inner.stop_all()

    async def died(self) -> SandboxDeath:
        return await self.inner.died()

    async def destroy(self) -> None:
        await self.inner.destroy()


class ProviderWrapper:
    """The properties of a ``SandboxProvider`` and its ``close``, passed to ``inner``.

    ``start`` and ``create`` are the subclass's: they are what a wrapper changes.
    """

    def __init__(self, inner: SandboxProvider) -> None:
        self.inner = inner

    @property
    def name(self) -> str:
        return self.inner.name

    @property
    def isolated(self) -> bool:
        return self.inner.isolated

    @property
    def description(self) -> str:
        return self.inner.description

    @property
    def carries_runtime(self) -> bool:
        return self.inner.carries_runtime

    @property
    def missing(self) -> str | None:
        return self.inner.missing

    async def image_facts(self, image: str | None) -> ImageFacts | None:
        return await self.inner.image_facts(image)

    async def close(self) -> None:
        await self.inner.close()
