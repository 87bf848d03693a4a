"""What the benchmarks of the fleet share: a fleet over engines with empty caches, and what a way gave."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import anyio
import numpy as np

from turnstile_server.demo import TINY
from turnstile_server.engines.fleet.fleet import Fleet
from turnstile_server.engines.fleet.placement import Placement
from turnstile_server.engines.sglang.engine import SGLangEngine
from turnstile_server.engines.versions import WeightVersions
from turnstile_server.settings import EngineSettings, FleetSettings


@dataclass
class Played:
    """What one way of playing episodes gave."""

    sampled: int = 0
    """Tokens."""
    found: int = 0
    """Prompt tokens that the engines still had in their caches."""
    failed: int = 0
    """Episodes that ended with an error."""
    waits: list[float] = field(default_factory=list)
    """Seconds of each call."""
    seconds: float = 0.0
    """Until the last episode had ended."""

    @property
    def throughput(self) -> float:
        """Sampled tokens per second."""
        return self.sampled / self.seconds


def call_times(played: Sequence[Played]) -> str:
    """p50 and p99 of the seconds of a call, as two cells of a table."""
    waits = np.concatenate([each.waits for each in played])
    return f"{np.percentile(waits, 50):.2f} s | {np.percentile(waits, 99):.2f} s"


@asynccontextmanager
async def flushed_fleet(
    urls: Sequence[str], settings: FleetSettings, placement: Placement | None = None
) -> AsyncIterator[Fleet]:
    """A watched fleet over real SGLang servers whose prefix caches are emptied by loading their weights again."""
    engine_settings = EngineSettings(kind="sglang")
    engines = [(url, SGLangEngine(url, engine_settings)) for url in urls]
    fleet = Fleet(engines, engine_settings, settings, WeightVersions(), placement=placement)
    await fleet.start()
    try:
        await fleet.load_weights(str(TINY), f"flushed-{time.monotonic_ns()}", "retract")
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(fleet.watch)
            yield fleet
            tasks.cancel_scope.cancel()
    finally:
        await fleet.close()
