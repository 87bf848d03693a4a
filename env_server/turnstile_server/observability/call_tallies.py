"""The gate's counts for every call: plain numbers, which are made metrics when the metrics are asked for.

The library's own counters take a lock and four Python calls for each number, and a call of a model has a dozen of
them. They are counted in the event loop alone, so a number needs no lock; whoever reads them in between sees
numbers of two neighbouring moments, as with any metrics.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from itertools import accumulate
from typing import Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

SECONDS: Final = (
    *(0.0005, 0.001, 0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0),
    *(300.0, 600.0),
)
"""Bucket bounds in seconds: the gate's own cost is at the low end, a long generation at the high end."""

_BOUNDS: Final = (*map(repr, SECONDS), "+Inf")


class Durations:
    """A histogram of seconds with the bounds ``SECONDS``, each of which is part of its bucket."""

    def __init__(self) -> None:
        self.total_s = 0.0
        self._counts = [0] * (len(SECONDS) + 1)

    def observe(self, seconds: float) -> None:
        self._counts[bisect_left(SECONDS, seconds)] += 1
        self.total_s += seconds

    def buckets(self) -> list[tuple[str, float]]:
        """Number of values that are at most each bound, as Prometheus writes them; the last one counts all."""
        return list(zip(_BOUNDS, map(float, accumulate(self._counts)), strict=True))


class CallTallies(Collector):
    """Seconds, bytes and tokens of calls and turns, as ``turnstile_*``."""

    def __init__(self) -> None:
        self.in_flight = 0
        self.calls: dict[tuple[str, int], int] = {}
        """By dialect and status."""
        self.call_seconds: dict[str, Durations] = {}
        """By dialect."""
        self.engine_seconds = Durations()
        self.overhead_seconds = Durations()
        self.turns = 0
        self.sampled = 0
        self.tokenized_bytes = 0
        self.rerendered = 0

    def collect(self) -> Iterator[Metric]:
        calls = CounterMetricFamily(
            "turnstile_calls", "Model calls answered, by dialect and status.", labels=("dialect", "status")
        )
        for (dialect, status), count in list(self.calls.items()):
            calls.add_metric((dialect, str(status)), count)
        yield calls
        yield _histogram("call_seconds", "From a call's arrival to its last byte.", self.call_seconds)
        in_flight = "Model calls being served now."
        yield GaugeMetricFamily("turnstile_calls_in_flight", in_flight, value=self.in_flight)
        yield _histogram("engine_seconds", "Time a model call spent in the engine.", {"": self.engine_seconds})
        yield _histogram(
            "overhead_seconds",
            "Time of a model call outside the engine: parse, match, render, commit, write.",
            {"": self.overhead_seconds},
        )
        yield _counter("tokens_sampled", "Tokens sampled and recorded in turns.", self.sampled)
        yield _counter("turns", "Turns committed.", self.turns)
        yield _counter(
            "tokenized_bytes",
            "UTF-8 bytes that went through the tokenizer: those of new messages only.",
            self.tokenized_bytes,
        )
        yield _counter("tokens_rerendered", "Prompt tokens rendered again because of a break.", self.rerendered)


def _counter(name: str, help_: str, value: int) -> CounterMetricFamily:
    return CounterMetricFamily(f"turnstile_{name}", help_, value=value)


def _histogram(name: str, help_: str, by_dialect: dict[str, Durations]) -> HistogramMetricFamily:
    """``by_dialect``: under "" for all dialects together."""
    family = HistogramMetricFamily(f"turnstile_{name}", help_, labels=None if "" in by_dialect else ("dialect",))
    for dialect, durations in list(by_dialect.items()):
        family.add_metric((dialect,) if dialect else (), durations.buckets(), durations.total_s)
    return family
