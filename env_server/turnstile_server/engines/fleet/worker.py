"""One engine of a fleet, and what is known of it. Changed by the roster alone.

    joining → serving ⇄ down | fenced | asleep → draining → removed

``fenced``: it answers and has other weights than the current ones (or a mixture), so it gets no calls.
"""

from __future__ import annotations

from asyncio import get_running_loop
from dataclasses import dataclass, field

import anyio

from turnstile.models import WorkerInfo, WorkerStatus
from turnstile_server.engines.fleet.limit import WorkerLimit
from turnstile_server.engines.fleet.window import EpisodeWindow
from turnstile_server.engines.protocol import Engine, EngineLoad


@dataclass(slots=True, eq=False)
class Worker:
    """``worker_id`` is unique for as long as the server lives. ``url`` None: the server's own engine."""

    worker_id: str
    url: str | None
    engine: Engine
    limit: WorkerLimit
    window: EpisodeWindow
    status: WorkerStatus = "joining"
    detail: str = ""
    """The reason that it does not serve."""
    version: str | None = None
    """The weights that it is known to have; None where that is not known."""
    calls: int = 0
    """Calls of ours on it."""
    load: EngineLoad | None = None
    failures: int = 0
    """Health checks failed in a row."""
    silent_since: float | None = None
    """While it answers nobody: since when (monotonic seconds)."""
    deaf_since: float | None = None
    """While it does not tell its load: since when it was asked (monotonic seconds)."""
    busy_since: float = 0.0
    """When it was given the first of the calls that it has (monotonic seconds)."""
    adapters: set[str] = field(default_factory=set)
    """The LoRA adapters that it has."""
    gone: bool = False
    """It will never serve again."""
    idle: anyio.Event | None = None
    """While somebody waits for it: set when ``calls`` falls to 0."""

    watching: anyio.CancelScope = field(default_factory=anyio.CancelScope)
    """Around ``watch``: cancelled when the worker is removed."""

    async def watch(self) -> None:
        """Runs the ``watch`` of its engine for as long as it is a worker."""
        with self.watching:
            await self.engine.watch()

    @property
    def serving(self) -> bool:
        return self.status == "serving"

    @property
    def answers(self) -> bool:
        """It can be told to pause, and be given weights."""
        return self.status in ("serving", "fenced", "draining")

    @property
    def room(self) -> int:
        """Calls that it can be given now."""
        return self.limit.value - self.calls if self.status == "serving" else 0

    def begin(self) -> None:
        """A call is given to it."""
        if self.calls == 0:
            self.busy_since = get_running_loop().time()
        self.calls += 1

    def end(self) -> None:
        self.calls -= 1
        if self.calls == 0 and self.idle is not None:
            self.idle.set()
            self.idle = None

    async def wait_idle(self) -> None:
        """Returns when it has no call of ours."""
        while self.calls:
            self.idle = self.idle or anyio.Event()
            await self.idle.wait()

    def info(self) -> WorkerInfo:
        return WorkerInfo(
            worker_id=self.worker_id,
            url=self.url,
            status=self.status,
            weight_version=self.version,
            running=self.calls,
            limit=self.limit.value,
            kv_used=None if self.load is None else self.load.kv_used,
            detail=self.detail,
        )
