"""How full a server is: its places, queues, sandboxes and memory at this moment, from counts that there are."""

from __future__ import annotations

import socket
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version

from turnstile.models import EpisodeStatus, ServerLoad
from turnstile_server.observability.metrics import Metrics
from turnstile_server.sandboxes.pool import SandboxPool
from turnstile_server.sandboxes.protocol import SandboxProvider
from turnstile_server.settings import Settings
from turnstile_server.settings.machine import available_memory_bytes, machine_resources


@dataclass(frozen=True, slots=True)
class LoadSources:
    """The sources that are read. ``refusal()``: why no new episode is taken. ``gradings_waiting()``: works that
    wait for a place."""

    server_id: str
    metrics: Metrics
    sandboxes: SandboxProvider
    settings: Settings
    draining: Callable[[], bool]
    drained: Callable[[], bool]
    refusal: Callable[[], str | None]
    gradings_waiting: Callable[[], int]


def server_load(sources: LoadSources) -> ServerLoad:
    counts, settings = sources.metrics.counts().episodes, sources.settings
    pool = sources.sandboxes if isinstance(sources.sandboxes, SandboxPool) else None
    return ServerLoad(
        server_id=sources.server_id,
        release=version("turnstile-rl"),
        node=socket.gethostname(),
        draining=sources.draining(),
        drained=sources.drained(),
        refusal=sources.refusal(),
        open=sum(counts.values()),
        max_open=settings.episodes.max_open,
        queued=counts.get(EpisodeStatus.QUEUED, 0),
        running=counts.get(EpisodeStatus.PREPARING, 0) + counts.get(EpisodeStatus.RUNNING, 0),
        max_running=settings.episodes.places,
        grading=counts.get(EpisodeStatus.GRADING, 0),
        gradings_waiting=sources.gradings_waiting(),
        grading_places=settings.grading.places,
        sandboxes_in_use=None if pool is None else pool.taken - pool.warm,
        sandboxes_warm=None if pool is None else pool.warm,
        max_sandboxes=None if pool is None else settings.sandboxes.places,
        memory_available_bytes=available_memory_bytes(),
        memory_bytes=int(machine_resources()["memory_mb"]) << 20,
        images=() if pool is None else pool.images,
    )
