"""A sandbox backend: local sandboxes with half of the memory."""

from __future__ import annotations

from dataclasses import replace
from typing import Self

from turnstile_server.sandboxes.background import BackgroundTasks
from turnstile_server.sandboxes.endpoint import AgentEndpoint
from turnstile_server.sandboxes.local.provider import LocalProvider
from turnstile_server.sandboxes.protocol import ProviderSetup, Sandbox, SandboxSpec
from turnstile_server.sandboxes.wrapper import ProviderWrapper


class FrugalProvider(ProviderWrapper):
    @classmethod
    def from_setup(cls, setup: ProviderSetup) -> Self:
        return cls(LocalProvider.from_setup(setup))

    async def start(self, agents: AgentEndpoint, tasks: BackgroundTasks) -> None:
        await self.inner.start(agents, tasks)

    async def create(self, spec: SandboxSpec) -> Sandbox:
        limits = replace(spec.limits, memory_bytes=spec.limits.memory_bytes // 2)
        return await self.inner.create(replace(spec, limits=limits))
