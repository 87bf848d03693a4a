"""The workers and their calls as metrics: read when the metrics are asked for, not counted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Final, get_args

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from turnstile.models import WorkerStatus
from turnstile_server.engines.fleet.fleet import Fleet

STATUSES: Final[tuple[str, ...]] = get_args(WorkerStatus)


class FleetCollector(Collector):
    """``turnstile_engine_*``. The label ``worker`` is the server's own name of a worker (``w1``)."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    def collect(self) -> Iterator[Metric]:
        fleet = self._fleet
        counts, current = fleet.calls.counts, fleet.roster.versions.current
        held_s = fleet.held_s
        yield _gauge("calls_waiting", "Model calls that wait for a place on a worker.", fleet.calls.waiting)
        yield _gauge(
            "held_seconds",
            "Time since calls are held by a pause, an update or sleep; 0: they are not.",
            held_s or 0,
        )
        yield _gauge(
            "weight_versions",
            "Weight versions served since the start.",
            0 if current is None else current.order + 1,
        )
        yield _counter("resumes", "Generations that were cut by an abort and continued.", counts.resumed)
        yield _counter("failovers", "Calls that were sent again after their worker failed.", counts.failed_over)
        yield _counter(
            "given_up_tokens",
            "Tokens that a worker sampled and that are in no completion.",
            counts.given_up_tokens,
        )
        yield _counter("moves", "Episodes whose next call went to another worker.", fleet.placement.moves)
        statuses = Counter(worker.status for worker in fleet.roster.workers)
        workers = GaugeMetricFamily("turnstile_engine_workers", "Workers, by status.", labels=["status"])
        for status in STATUSES:
            workers.add_metric([status], statuses[status])  # type: ignore[index]
        yield workers
        running = GaugeMetricFamily(
            "turnstile_engine_calls_running", "Model calls on a worker.", labels=["worker"]
        )
        limits = GaugeMetricFamily(
            "turnstile_engine_call_limit", "Most calls a worker is given.", labels=["worker"]
        )
        cache = GaugeMetricFamily(
            "turnstile_engine_kv_used", "Share of a worker's attention cache in use.", labels=["worker"]
        )
        for worker in fleet.roster.workers:
            running.add_metric([worker.worker_id], worker.calls)
            limits.add_metric([worker.worker_id], worker.limit.value)
            if worker.load is not None and worker.load.kv_used is not None:
                cache.add_metric([worker.worker_id], worker.load.kv_used)
        yield from (running, limits, cache)


def _gauge(name: str, help_: str, value: float) -> Metric:
    return GaugeMetricFamily(f"turnstile_engine_{name}", help_, value=value)


def _counter(name: str, help_: str, value: float) -> Metric:
    return CounterMetricFamily(f"turnstile_engine_{name}", help_, value=value)
