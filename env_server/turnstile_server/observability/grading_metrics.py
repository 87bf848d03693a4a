"""The queue of gradings as a metric, read at each scrape."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector


class GradingCollector(Collector):
    """``turnstile_gradings_waiting``. ``waiting()``: works that wait for a place to be judged."""

    def __init__(self, waiting: Callable[[], int]) -> None:
        self._waiting = waiting

    def collect(self) -> Iterator[Metric]:
        yield GaugeMetricFamily(
            "turnstile_gradings_waiting",
            "Works that wait for one of the places to be judged (grading.parallel).",
            value=float(self._waiting()),
        )
