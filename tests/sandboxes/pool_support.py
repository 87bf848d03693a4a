"""A provider in memory, whose sandboxes can die, fail to be made, and are counted."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from echo_app import agents_of

from turnstile_server.egress.log import NetworkLog
from turnstile_server.egress.policy import NetworkPhase
from turnstile_server.errors import SandboxDeath, SandboxFailed
from turnstile_server.sandboxes.background import BackgroundTasks
from turnstile_server.sandboxes.endpoint import AgentEndpoint
from turnstile_server.sandboxes.protocol import (
    MADE_AT_ONCE,
    Command,
    ExecResult,
    Process,
    SandboxLimits,
    SandboxOrigin,
    SandboxSpec,
    User,
)

LIMITS = SandboxLimits(memory_bytes=64 << 20, cpus=1.0, pids=32, disk_bytes=8 << 20)


def spec(image: str = "a") -> SandboxSpec:
    return SandboxSpec(LIMITS, image=image)


NO_AGENTS = agents_of(None)
"""For sandboxes in which no agent runs."""


@dataclass(eq=False)
class MemorySandbox:
    sandbox_id: str
    spec: SandboxSpec
    owner: MemoryProvider
    alive: bool = True
    destroyed: bool = False
    agent_url: str | None = None
    origin: SandboxOrigin = MADE_AT_ONCE

    @property
    def workdir(self) -> str:
        return self.spec.workdir

    @property
    def python(self) -> str:
        return "python3"

    @property
    def can_launch(self) -> bool:
        return True

    def admit(self, episode_id: str | None) -> None:
        return

    def enter_phase(self, phase: NetworkPhase | None, log: NetworkLog | None = None) -> None:
        """It has no network."""

    async def stop_all(self) -> None:
        await asyncio.sleep(0)
        if not self.alive:
            raise SandboxFailed("it died")

    async def died(self) -> SandboxDeath:
        raise NotImplementedError

    async def destroy(self) -> None:
        if self.destroyed:
            return
        self.destroyed = True
        await self.owner.may_destroy.wait()
        self.owner.open.discard(self)

    async def exec(self, command: Command) -> ExecResult:
        raise NotImplementedError

    async def start(self, command: Command) -> Process:
        raise NotImplementedError

    async def read(self, path: str, max_bytes: int) -> bytes:
        raise NotImplementedError

    async def write(self, path: str, data: bytes, *, mode: int | None = None, user: User = User.AGENT) -> None:
        raise NotImplementedError

    async def upload(self, archive: bytes, target: str, *, user: User = User.AGENT) -> None:
        raise NotImplementedError

    async def download(self, path: str, max_bytes: int) -> bytes:
        raise NotImplementedError


@dataclass(eq=False)
class MemoryProvider:
    name: str = "memory"
    isolated: bool = True
    description: str = "memory"
    missing: str | None = None
    open: set[MemorySandbox] = field(default_factory=set)
    made: list[MemorySandbox] = field(default_factory=list)
    most: int = 0
    fail: Exception | None = None
    attempts: int = 0
    closed: bool = False
    may_create: asyncio.Event = field(default_factory=asyncio.Event)
    may_destroy: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.may_create.set()
        self.may_destroy.set()

    async def start(self, agents: AgentEndpoint, tasks: BackgroundTasks) -> None:
        return

    async def create(self, spec: SandboxSpec) -> MemorySandbox:
        self.attempts += 1
        await self.may_create.wait()
        await asyncio.sleep(0)
        if self.fail is not None:
            raise self.fail
        sandbox = MemorySandbox(f"sbx_{len(self.made)}", spec, self)
        self.made.append(sandbox)
        self.open.add(sandbox)
        self.most = max(self.most, len(self.open))
        return sandbox

    async def close(self) -> None:
        self.closed = True
