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
from turnstile_server.sandboxes.protocol import (
    Command,
    ExecResult,
    Process,
    Sandbox,
    SandboxProvider,
    SandboxSpec,
    User,
)

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


class RecordingProvider:
    """A ``SandboxProvider``: ``inner``'s sandboxes, and what they do told to ``watch``."""

    def __init__(self, inner: SandboxProvider, watch: Watch) -> None:
        self._inner = inner
        self._watch = watch

    @property
    def name(self) -> str:
        return self._inner.name

    @property
    def isolated(self) -> bool:
        return self._inner.isolated

    @property
    def missing(self) -> str | None:
        return self._inner.missing

    async def start(self, agent_door: ASGIApp) -> None:
        await self._inner.start(_counted(agent_door, self._watch.requests))

    async def create(self, spec: SandboxSpec) -> Sandbox:
        sandbox = RecordingSandbox(await self._inner.create(spec), self._watch)
        if self._watch.created is not None:
            try:
                await self._watch.created(sandbox)
            except BaseException:
                with anyio.CancelScope(shield=True):
                    await sandbox.destroy()
                raise
        return sandbox

    async def close(self) -> None:
        await self._inner.close()


class RecordingSandbox:
    """A ``Sandbox`` whose memory is asked for before it is destroyed."""

    def __init__(self, inner: Sandbox, watch: Watch) -> None:
        self._inner = inner
        self._watch = watch
        self._episode_id: str | None = None

    @property
    def sandbox_id(self) -> str:
        return self._inner.sandbox_id

    @property
    def workdir(self) -> str:
        return self._inner.workdir

    @property
    def agent_door(self) -> str | None:
        return self._inner.agent_door

    def admit(self, episode_id: str | None) -> None:
        self._episode_id = episode_id or self._episode_id
        self._inner.admit(episode_id)

    async def exec(self, command: Command) -> ExecResult:
        return await self._inner.exec(command)

    async def start(self, command: Command) -> Process:
        return await self._inner.start(command)

    async def read(self, path: str, max_bytes: int) -> bytes:
        return await self._inner.read(path, max_bytes)

    async def write(self, path: str, data: bytes, *, mode: int | None = None) -> None:
        await self._inner.write(path, data, mode=mode)

    async def upload(self, archive: bytes, target: str, *, user: User = User.AGENT) -> None:
        await self._inner.upload(archive, target, user=user)

    async def download(self, path: str, max_bytes: int) -> bytes:
        return await self._inner.download(path, max_bytes)

    async def stop_all(self) -> None:
        await self._inner.stop_all()

    async def died(self) -> None:
        await self._inner.died()

    async def destroy(self) -> None:
        try:
            if self._episode_id is not None:
                await self._measure(self._episode_id)
        finally:
            await self._inner.destroy()

    async def _measure(self, episode_id: str) -> None:
        with anyio.move_on_after(MEMORY_S):
            try:
                command = Command(argv=("cat", *MEMORY_FILES), timeout_s=MEMORY_S)
                result = await self._inner.exec(command)
            except SandboxFailed:  # it died, and its figures with it
                return
            figures = [int(line) for line in result.stdout.split() if line.isdigit()]
            if figures:
                self._watch.peak_bytes[episode_id] = max(figures)


def _counted(door: ASGIApp, requests: defaultdict[str, Counter[Request]]) -> ASGIApp:
    async def counted(scope: Scope, receive: Receive, send: Send) -> None:
        status = 0

        async def sent(message: MutableMapping[str, Any]) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await door(scope, receive, sent)
        finally:
            if scope["type"] == "http" and (found := _EPISODE.fullmatch(scope["path"])) is not None:
                requests[found[1]][Request(scope["method"], found[2], status)] += 1

    return counted
