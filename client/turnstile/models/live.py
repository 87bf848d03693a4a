"""The present and recent activity of a server: counters and gauges, sampled every few seconds."""

from __future__ import annotations

from turnstile.models.base import Model


class LiveSample(Model):
    """One look at a server. Counters count from its start: rates are differences of two samples."""

    at: float
    """Unix seconds."""
    sampled_tokens: int
    """Counter: tokens sampled and recorded in turns."""
    turns: int
    """Counter: turns committed."""
    calls_in_flight: int
    """Model calls being served, those that wait included."""
    engine_waiting: int | None
    """Model calls that wait for a place on a worker; None where one engine takes all calls by itself."""
    episodes: dict[str, int]
    """Episodes that have not ended, by status; without those of which there is none."""
    ended: dict[str, int]
    """Counters: episodes that ended since the start, by final status."""
    sandboxes_in_use: int | None
    """Lent, being made or being removed; None where the server has no pool of sandboxes."""
    sandboxes_warm: int | None
    """Ready and not lent."""
    journal_bytes: int
    """Counter: bytes appended to the journal."""
    journal_queued_bytes: int
    """Bytes that wait for the disk."""


class LiveReport(Model):
    """Answer to ``GET /live``. ``samples``: the oldest first, ``sample_s`` seconds apart."""

    sample_s: float
    samples: tuple[LiveSample, ...]
