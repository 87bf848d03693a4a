"""Sandboxes that are watched: who is told when one is made, what they asked of the agent door, how much memory
each had at most. What is watched goes on as before; a figure that cannot be had is missing."""

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
"""Of cgroups version 2 and 1, as a container sees its own."""
MEMORY_S = 5.0

_EPISODE = re.compile(r"/e/([^/]+)(.*)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Request:
    """A request of an agent: ``path`` without its episode, the HTTP status that it got."""

    method: str
    path: str
    status: int


@dataclass(slots=True)
class Watch:
    """What was seen. ``created``: called with every new sandbox, before anything of an agent is in it."""

    created: Callable[[Sandbox], Awaitable[None]] | None = None
    requests: defaultdict[str, Counter[Request]] = field(default_factory=lambda: defaultdict(Counter))
    """By episode id."""
    peak_bytes: dict[str, int] = field(default_factory=dict)
    """Most memory by episode id, the files that the sandbox holds in memory included."""


class RecordingProvider(ProviderWrapper):
    """A ``SandboxProvider``: ``inner``'s sandboxes, and what they do told to ``watch``."""

    def __init__(self, inner: SandboxProvider, watch: Watch) -> None:
        super().__init__(inner)
        self._watch = watch

    async def start(self, agents: AgentEndpoint, tasks: BackgroundTasks) -> None:
        await self.inner.start(agents, tasks)

    async def create(self, spec: SandboxSpec) -> Sandbox:
        sandbox = RecordingSandbox(await self.inner.create(spec), self._watch)
        if self._watch.created is not None:
            try:
                await self._watch.created(sandbox)
            except BaseException:
                with anyio.CancelScope(shield=True):
                    await sandbox.destroy()
                raise
        return sandbox


class RecordingSandbox(SandboxWrapper):
    """A ``Sandbox`` whose memory is asked for before it is destroyed."""

    def __init__(self, inner: Sandbox, watch: Watch) -> None:
        super().__init__(inner)
        self._watch = watch
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
                command = Command(argv=("cat", *MEMORY_FILES), timeout_s=MEMORY_S)
                result = await self.inner.exec(command)
            except SandboxFailed:  # it died, and its figures with it
                return
            figures = [int(line) for line in result.stdout.split() if line.isdigit()]
            if figures:
                self._watch.peak_bytes[episode_id] = max(figures)


def counted(app: ASGIApp, requests: defaultdict[str, Counter[Request]]) -> ASGIApp:
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
                requests[found[1]][Request(scope["method"], found[2], status)] += 1

    return counting
