"""Constants of this package: bounds that nobody has asked to change. Times are seconds, sizes bytes."""

from __future__ import annotations

from dataclasses import dataclass

from turnstile_server.settings import Bounds


@dataclass(frozen=True)
class TracingBounds(Bounds):
    """Bounds of the export of spans."""

    batch_spans: int = 512
    """Spans in one request to the collector."""
    max_queued: int = 1000
    """Ended episodes that wait for their export; further ones are not exported."""
    shutdown_s: float = 5.0
    """At the end of the server: how long the export of what has ended may take."""


@dataclass(frozen=True)
class LiveBounds(Bounds):
    """Bounds of the samples in memory."""

    kept_samples: int = 1800
    """The latest samples that are kept; about 1 KB each. With 2 s they are one hour."""
