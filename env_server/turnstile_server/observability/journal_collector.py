"""The journal's own counters on the metrics page, read when somebody looks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from turnstile_server.journal.stats import JournalStats

_GAUGES = frozenset({"queued_bytes"})


class JournalCollector(Collector):
    """Every field of ``JournalStats`` as ``turnstile_journal_{field}``."""

    def __init__(self, stats: JournalStats) -> None:
        self._stats = stats

    def collect(self) -> Iterator[Metric]:
        values = {field.name: float(getattr(self._stats, field.name)) for field in fields(self._stats)}
        for name, value in values.items():
            family = GaugeMetricFamily if name in _GAUGES else CounterMetricFamily
            yield family(f"turnstile_journal_{name}", f"Journal: {name.replace('_', ' ')}.", value=value)
