"""The network of sandboxes as metrics, read from the proxy's own counts at each scrape."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from turnstile.models import NetworkOutcome
from turnstile_server.egress.budget import EgressStats


class EgressCollector(Collector):
    """``turnstile_network_*``: connections by outcome, bytes each way, connections now."""

    def __init__(self, stats: EgressStats) -> None:
        self._stats = stats

    def collect(self) -> Iterator[Metric]:
        stats = self._stats
        connections = CounterMetricFamily(
            "turnstile_network_connections",
            "Connections of sandboxes to the proxy, by outcome.",
            labels=["outcome"],
        )
        for outcome in NetworkOutcome:
            connections.add_metric([outcome.value], float(stats.outcomes[outcome]))
        yield connections
        passed = CounterMetricFamily(
            "turnstile_network_bytes",
            "Bytes between sandboxes and the network, by direction.",
            labels=["direction"],
        )
        passed.add_metric(["up"], float(stats.bytes_up))
        passed.add_metric(["down"], float(stats.bytes_down))
        yield passed
        yield GaugeMetricFamily(
            "turnstile_network_connections_open",
            "Connections of sandboxes to the proxy now.",
            value=float(stats.open),
        )
