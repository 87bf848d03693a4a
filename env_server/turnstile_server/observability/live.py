"""Samples of what the server does, for those who look at it without a Prometheus beside it.

Every ``observability.sample_s`` seconds the counters that exist are read and kept in a ring of
``LiveBounds.kept_samples``. Nothing is counted for this alone, and nothing is written.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import anyio

from turnstile.models import LiveReport, LiveSample
from turnstile_server.engines.fleet.fleet import Fleet
from turnstile_server.journal.stats import JournalStats
from turnstile_server.observability.bounds import LiveBounds
from turnstile_server.observability.metrics import Metrics
from turnstile_server.sandboxes.pool import SandboxPool
from turnstile_server.sandboxes.protocol import SandboxProvider
from turnstile_server.settings import ObservabilitySettings


@dataclass(frozen=True, slots=True)
class LiveSources:
    """The sources that are read."""

    metrics: Metrics
    journal: JournalStats
    fleet: Fleet | None
    sandboxes: SandboxProvider


class LiveSamples:
    """The ring. ``take`` is called by ``live_samples``; ``report`` at any time."""

    def __init__(self, sources: LiveSources, settings: ObservabilitySettings) -> None:
        self._sources = sources
        self._sample_s = settings.sample_s
        self._kept: deque[LiveSample] = deque(maxlen=settings.bounds_of(LiveBounds).kept_samples)

    def take(self) -> None:
        sources, counts = self._sources, self._sources.metrics.counts()
        pool = sources.sandboxes if isinstance(sources.sandboxes, SandboxPool) else None
        self._kept.append(
            LiveSample(
                at=time.time(),
                sampled_tokens=counts.sampled_tokens,
                turns=counts.turns,
                calls_in_flight=counts.calls_in_flight,
                engine_waiting=None if sources.fleet is None else sources.fleet.calls.waiting,
                episodes=counts.episodes,
                ended=counts.ended,
                sandboxes_in_use=None if pool is None else pool.taken - pool.warm,
                sandboxes_warm=None if pool is None else pool.warm,
                journal_bytes=sources.journal.appended_bytes,
                journal_queued_bytes=sources.journal.queued_bytes,
            )
        )

    def report(self, since: float) -> LiveReport:
        """The samples taken later than ``since`` (Unix seconds)."""
        found = tuple(sample for sample in self._kept if sample.at > since)
        return LiveReport(sample_s=self._sample_s, samples=found)


@asynccontextmanager
async def live_samples(sources: LiveSources, settings: ObservabilitySettings) -> AsyncIterator[LiveSamples]:
    """Takes a sample at once, and further ones while in the block."""
    samples = LiveSamples(sources, settings)

    async def go_on() -> None:
        while True:
            await anyio.sleep(settings.sample_s)
            samples.take()

    samples.take()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(go_on)
        yield samples
        tasks.cancel_scope.cancel()
