"""The server's metrics: one object, handed to every part that counts, with a typed method per fact.

What must hold: two servers in one process do not share a registry; label values come from closed sets of this
code, never from a request; counting never fails a call.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from dataclasses import dataclass, fields
from importlib.metadata import version
from typing import Literal, get_args

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.registry import Collector

from turnstile.models import EpisodeStatus, Fault, StalenessPolicy, Turn
from turnstile_server.http.wrong_keys import Surface
from turnstile_server.journal.stats import JournalStats
from turnstile_server.observability.call_tallies import CallTallies, Durations

CONTENT_TYPE = CONTENT_TYPE_LATEST

_GAUGES = frozenset({"queued_bytes"})
"""Fields of ``JournalStats`` that may fall."""


@dataclass(frozen=True, slots=True)
class Counts:
    """Some metrics as they are now; statuses without any episode are left out."""

    sampled_tokens: int
    turns: int
    calls_in_flight: int
    episodes: dict[str, int]
    ended: dict[str, int]


class Metrics:
    """All metrics of one server, named ``turnstile_*``. Seconds, bytes and tokens."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._tallies = CallTallies()
        """The counts for every call."""
        self._registry.register(self._tallies)
        info = self._gauge("server_info", "The host and the release of this server; always 1.", "node", "release")
        info.labels(socket.gethostname(), version("turnstile-rl")).set(1)
        self._trained = self._counter("tokens_trained", "Sampled tokens that a sample trains, at episode end.")
        self._untrained = self._counter(
            "tokens_untrained", "Sampled tokens that no sample trains, at episode end, by reason.", "reason"
        )
        self._discarded = self._counter(
            "tokens_discarded", "Sampled tokens of failed or abandoned attempts, by reason.", "reason"
        )
        self._breaks = self._counter("breaks", "Calls that could not append, by reason.", "reason")
        self._cosmetic = self._counter(
            "cosmetic_edits", "Tolerated changes of replies and messages, by kind.", "kind"
        )
        self._low_share = self._counter(
            "low_trained_share_episodes", "Episodes that ended below episodes.trained_share_alert."
        )
        self._stale = self._counter(
            "stale_episodes", "Episodes that exceeded their bound of staleness, by its policy.", "policy"
        )
        self._episodes = self._gauge("episodes", "Episodes that have not ended, by status.", "status")
        self._ended = self._counter("episodes_ended", "Episodes that ended, by final status.", "status")
        self._failed = self._counter(
            "episodes_failed", "Episodes that ended without a result, by whose fault it was.", "fault"
        )
        self._regrades = self._counter("regrades", "Kept work that was judged again, by outcome.", "outcome")
        self._snapshots = self._counter(
            "turn_snapshots", "Snapshots that were to be taken after a turn, by outcome.", "outcome"
        )
        self._work_bytes = self._gauge("kept_work_bytes", "What kept work takes on disk.")
        self._wrong_keys = self._counter(
            "wrong_keys", "Requests with a wrong key, by where it was shown.", "surface"
        )
        for surface in get_args(Surface):  # there from the start, so that a rate sees the first one
            self._wrong_keys.labels(surface)
        self._control = self._counter(
            "control_requests", "Requests to the control API, by route and HTTP status.", "route", "status"
        )

    def watch(self, collector: Collector) -> None:
        """Adds the counters of another part."""
        self._registry.register(collector)

    # The gate

    def call_started(self) -> None:
        self._tallies.in_flight += 1

    def call_ended(self, dialect: str, status: int, total_s: float, engine_s: float | None = None) -> None:
        """One per ``call_started``. ``engine_s`` None: the request had no engine time of its own: it failed, or it
        joined or replayed an earlier call."""
        tallies = self._tallies
        tallies.in_flight -= 1
        tallies.calls[dialect, status] = tallies.calls.get((dialect, status), 0) + 1
        seconds = tallies.call_seconds.get(dialect)
        if seconds is None:
            seconds = tallies.call_seconds[dialect] = Durations()
        seconds.observe(total_s)
        if engine_s is not None:
            tallies.engine_seconds.observe(engine_s)
            tallies.overhead_seconds.observe(max(0.0, total_s - engine_s))

    def turn_committed(self, turn: Turn, tokenized_bytes: int) -> None:
        """``tokenized_bytes``: UTF-8 bytes that were tokenized to make the turn's context."""
        tallies = self._tallies
        tallies.turns += 1
        tallies.sampled += len(turn.completion_ids)
        tallies.tokenized_bytes += tokenized_bytes
        tallies.rerendered += turn.rerendered_tokens
        if turn.break_ is not None:
            self._breaks.labels(turn.break_.reason.value).inc()
        for kind in turn.echo:
            self._cosmetic.labels(kind).inc()

    def tokens_discarded(self, reason: str, count: int) -> None:
        self._discarded.labels(reason).inc(count)

    # Episodes

    def episode_moved(self, before: EpisodeStatus | None, after: EpisodeStatus) -> None:
        """A change of status; ``before`` None: created (or loaded at start)."""
        if before is not None and not before.ended:
            self._episodes.labels(before.value).dec()
        if not after.ended:
            self._episodes.labels(after.value).inc()
        elif before is not None:
            self._ended.labels(after.value).inc()

    def tokens_trained(self, count: int) -> None:
        self._trained.inc(count)

    def tokens_untrained(self, reason: str, count: int) -> None:
        self._untrained.labels(reason).inc(count)

    def low_trained_share(self) -> None:
        self._low_share.inc()

    def stale_episode(self, policy: StalenessPolicy) -> None:
        """An episode ended beyond its bound of staleness."""
        self._stale.labels(policy).inc()

    def episode_failed(self, fault: Fault) -> None:
        """An episode ended by somebody's fault; the infrastructure's gave no result, and no reward of 0."""
        self._failed.labels(fault.value).inc()

    def regraded(self, outcome: Literal["recorded", "applied", "failed"]) -> None:
        """``recorded``: beside the episode's grade; ``applied``: in its place; ``failed``: not judged."""
        self._regrades.labels(outcome).inc()

    def turn_snapshot(self, outcome: Literal["kept", "missed"]) -> None:
        """Count a turn's snapshot, of an episode that keeps one for every turn."""
        self._snapshots.labels(outcome).inc()

    def work_kept(self, total: int) -> None:
        """``total``: bytes that all kept work takes now."""
        self._work_bytes.set(total)

    # The control API

    def control_request(self, route: str, status: int) -> None:
        """``route``: the route's template (``/episodes/{episode_id}``), never the path itself."""
        self._control.labels(route, str(status)).inc()

    def wrong_key(self, surface: Surface) -> None:
        """A request showed a key that does not open what it asked for."""
        self._wrong_keys.labels(surface).inc()

    def counts(self) -> Counts:
        return Counts(
            sampled_tokens=self._tallies.sampled,
            turns=self._tallies.turns,
            calls_in_flight=self._tallies.in_flight,
            episodes=_by_label(self._episodes),
            ended=_by_label(self._ended),
        )

    def exposition(self) -> bytes:
        """All metrics in the Prometheus text format (``CONTENT_TYPE``)."""
        return generate_latest(self._registry)

    def _counter(self, name: str, help_: str, *labels: str) -> Counter:
        return Counter(f"turnstile_{name}", help_, labels, registry=self._registry)

    def _gauge(self, name: str, help_: str, *labels: str) -> Gauge:
        return Gauge(f"turnstile_{name}", help_, labels, registry=self._registry)


def _by_label(metric: Counter | Gauge) -> dict[str, int]:
    """The values that are not 0, by the value of the only label ("" for a metric without)."""
    return {
        next(iter(sample.labels.values()), ""): round(sample.value)
        for sample in next(iter(metric.collect())).samples
        if sample.value and not sample.name.endswith("_created")
    }


class JournalCollector(Collector):
    """Every field of ``JournalStats`` as ``turnstile_journal_{field}``."""

    def __init__(self, stats: JournalStats) -> None:
        self._stats = stats

    def collect(self) -> Iterator[Metric]:
        values = {field.name: float(getattr(self._stats, field.name)) for field in fields(self._stats)}
        for name, value in values.items():
            family = GaugeMetricFamily if name in _GAUGES else CounterMetricFamily
            yield family(f"turnstile_journal_{name}", f"Journal: {name.replace('_', ' ')}.", value=value)
