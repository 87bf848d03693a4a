"""Records what agents do in their sandboxes: sandboxes made, requests to the server, peak memory.

The sandboxes work as before. A figure that cannot be had is missing.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass, field
from typing import Any

import anyio
from starlette.types import ASGIApp, Receive, Scope, Send

from turnstile_server.errors import SandboxFailed
from turnstile_server.sandboxes.background import BackgroundTasks
from turnstile_server.sandboxes.endpoint import AgentEndpoint
from turnstile_server.sandboxes.protocol import Command, Sandbox, SandboxProvider, SandboxSpec
from turnstile_server.sandboxes.wrapper import ProviderWrapper, SandboxWrapper

MEMORY_FILES = ("/sys/fs/cgroup/memory.peak", "/sys/fs/cgroup/memory/memory.max_usage_in_bytes")
"""Files in which a container sees its peak memory: cgroups version 2 and 1."""
MEMORY_S = 5.0
"""Time to read it."""

_EPISODE = re.compile(r"/e/([^/]+)(.*)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class AgentRequest:
    """A request of an agent: ``path`` without its episode, and the HTTP status of the reply."""

    method: str
    path: str
    status: int


@dataclass(slots=True)
class Recording:
    """Requests and peak memory of agents, by episode id. ``created`` is called with every new sandbox before an
    agent is in it."""

    created: Callable[[Sandbox], Awaitable[None]] | None = None
    requests: defaultdict[str, Counter[AgentRequest]] = field(default_factory=lambda: defaultdict(Counter))
    peak_bytes: dict[str, int] = field(default_factory=dict)
    """Peak memory, including the files that the sandbox holds in memory."""


class RecordingProvider(ProviderWrapper):
    """A ``SandboxProvider`` that writes what its sandboxes do into ``recording``."""

    def __init__(self, inner: SandboxProvider, recording: Recording) -> None:
        super().__init__(inner)
        self._recording = recording

    async def start(self, agents: AgentEndpoint, tasks: BackgroundTasks) -> None:
        await self.inner.start(agents, tasks)

    async def create(self, spec: SandboxSpec) -> Sandbox:
        sandbox = RecordingSandbox(await self.inner.create(spec), self._recording)
        if self._recording.created is not None:
            try:
                await self._recording.created(sandbox)
            except BaseException:
                with anyio.CancelScope(shield=True):
                    await sandbox.destroy()
                raise
        return sandbox


class RecordingSandbox(SandboxWrapper):
    """A ``Sandbox`` whose peak memory is read before it is destroyed."""

    def __init__(self, inner: Sandbox, recording: Recording) -> None:
        super().__init__(inner)
        self._recording = recording
        self._episode_id: str | None = None

    def admit(self, episode_id: str | None) -> None:
        self._episode_id = episode_id or self._episode_id
        super().admit(episode_id)

    async def destroy(self) -> None:
        try:
            if self._episode_id is not None:
                await self._measure(self._episode_id)
        finally:
            await self.inner.destroy()

    async def _measure(self, episode_id: str) -> None:
        with anyio.move_on_after(MEMORY_S):
            try:
                result = await self.inner.exec(Command(argv=("cat", *MEMORY_FILES), timeout_s=MEMORY_S))
            except SandboxFailed:  # it died, and its figures with it
                return
            figures = [int(line) for line in result.stdout.split() if line.isdigit()]
            if figures:
                self._recording.peak_bytes[episode_id] = max(figures)


def counted(app: ASGIApp, requests: defaultdict[str, Counter[AgentRequest]]) -> ASGIApp:
    """``app``, with every request of an episode counted into ``requests``."""

    async def counting(scope: Scope, receive: Receive, send: Send) -> None:
        status = 0

        async def sent(message: MutableMapping[str, Any]) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await app(scope, receive, sent)
        finally:
            if scope["type"] == "http" and (found := _EPISODE.fullmatch(scope["path"])) is not None:
                requests[found[1]][AgentRequest(scope["method"], found[2], status)] += 1

    return counting
