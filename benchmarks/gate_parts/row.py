"""What was measured of one server at one length: slices, and the figures that are made of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

Figures = dict[str, Any]
QUIET = 0.25
"""The share of slices that the CPU time of a call is taken at: the quarter that the machine disturbed least."""


@dataclass(frozen=True, slots=True)
class Slice:
    """Calls made one after the other, or several at once, within ``wall_s``."""

    calls: int
    cpu_s: float
    """Of the server's processes."""
    wall_s: float


@dataclass
class Row:
    """One server, one length, streamed or not. Times in seconds."""

    server: str
    length: int
    stream: bool
    body_bytes: int = 0
    result_bytes: int = 0
    latencies: list[float] = field(default_factory=list)
    """Of the calls of ``single``."""
    single: list[Slice] = field(default_factory=list)
    """One call in flight."""
    several: list[Slice] = field(default_factory=list)
    """One call of each episode in flight."""
    first_texts: list[float] = field(default_factory=list)
    """From the engine's write of its first token to the read of the first text."""
    counted: int = 0
    """Calls that ``counters`` are of."""
    counters: dict[str, float] = field(default_factory=dict)
    """Growth of Turnstile's counters."""

    @property
    def calls(self) -> int:
        return len(self.latencies)

    def figures(self) -> Figures:
        """Milliseconds, and turns per second as measured and as the CPU time alone would allow.

        ``cpu_ms``: the 25th percentile over slices. ``cpu_mean_ms``: over all calls, so with each garbage
        collection and each disturbance. Turns per second are the 75th percentile over slices."""
        firsts = {
            f"first_text_p{round(100 * share)}_ms": 1e3 * float(np.quantile(self.first_texts, share))
            for share in (0.5, 0.99)
            if self.first_texts
        }
        return {
            "server": self.server,
            "tokens": self.length,
            "stream": self.stream,
            "body_bytes": self.body_bytes,
            "calls": self.calls,
            "slices": len(self.single),
            "p50_ms": 1e3 * float(np.quantile(self.latencies, 0.5)),
            "p99_ms": 1e3 * float(np.quantile(self.latencies, 0.99)),
            "cpu_ms": 1e3 * quiet([each.cpu_s / each.calls for each in self.single]),
            "cpu_mean_ms": 1e3 * sum(each.cpu_s for each in self.single) / self.calls,
            "turns_per_s": 1 / quiet([each.wall_s / each.calls for each in self.several]),
            "turns_per_cpu_s": 1 / quiet([each.cpu_s / each.calls for each in self.several]),
            "fsync_ms": 1e3 * self._per_call("turnstile_journal_fsync_seconds"),
            "fsyncs": self._per_call("turnstile_journal_fsyncs"),
            "tokenized_bytes": self._per_call("turnstile_tokenized_bytes"),
            **firsts,
        }

    def count(self, before: dict[str, float], after: dict[str, float], calls: int) -> None:
        """Adds what Turnstile's counters, as ``Server.metrics`` gives them, grew by over ``calls`` calls."""
        self.counted += calls
        for name, value in after.items():
            if name.endswith("_total"):
                counter = name.removesuffix("_total")
                self.counters[counter] = self.counters.get(counter, 0.0) + value - before.get(name, 0.0)

    def _per_call(self, counter: str) -> float:
        return self.counters.get(counter, 0.0) / self.counted if self.counted else 0.0


def quiet(costs: Sequence[float]) -> float:
    """The 25th percentile."""
    return float(np.quantile(costs, QUIET))
