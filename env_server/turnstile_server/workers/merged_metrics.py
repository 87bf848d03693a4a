"""The metrics, the samples and the load of all workers as those of one server. Pure.

Counters, histograms and amounts (episodes, bytes, calls) are summed over the workers: a dashboard shows the server
as it did. What each worker says of something that all share is not summed: of those the largest is taken.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Final

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from turnstile.models import LiveReport, LiveSample, ServerLoad
from turnstile.models.base import Model

OF_ALL: Final = frozenset(
    {
        "turnstile_engine_workers",
        "turnstile_engine_weight_versions",
        "turnstile_engine_held_seconds",
        "turnstile_engine_kv_used",
        "turnstile_server_info",
    }
)
"""Gauges about the engines, which all workers share, and the host: each says the same."""
OF_THE_FRONT: Final = frozenset({"turnstile_control_requests"})
"""Counted by the process in front, which every request comes to once; what workers count is not asked."""
_COUNTED: Final = frozenset({"counter", "histogram", "summary"})
"""Types of metrics that only grow."""


class _Families(Collector):
    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = list(families)

    def collect(self) -> Iterable[Metric]:
        return self._families


def merged_exposition(front: str, workers: Sequence[str]) -> bytes:
    """Metrics in the Prometheus text format: those of the process in front and of all workers, as one's."""
    return _exposition(_merged(front, workers))


def merged_counters(workers: Sequence[str]) -> str:
    """The workers' metrics that only grow, merged; empty for none."""
    families = [family for family in _merged("", workers) if family.type in _COUNTED]
    return _exposition(families).decode() if families else ""


def _merged(front: str, workers: Sequence[str]) -> list[Metric]:
    families: dict[str, Metric] = {}
    values: dict[str, dict[tuple[str, tuple[tuple[str, str], ...]], float]] = {}
    for place, text in enumerate((front, *workers)):
        for family in text_string_to_metric_families(text):
            if place and family.name in OF_THE_FRONT:
                continue
            families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
            found = values.setdefault(family.name, {})
            for sample in family.samples:
                key = (sample.name, tuple(sorted(sample.labels.items())))
                if key not in found:
                    found[key] = sample.value
                elif family.name in OF_ALL:
                    found[key] = max(found[key], sample.value)
                elif sample.name.endswith("_created"):
                    found[key] = min(found[key], sample.value)
                else:
                    found[key] += sample.value
    for name, family in families.items():
        for (sample_name, labels), value in values[name].items():
            family.add_sample(sample_name, dict(labels), value)
    return list(families.values())


def _exposition(families: Iterable[Metric]) -> bytes:
    registry = CollectorRegistry()
    registry.register(_Families(families))
    return generate_latest(registry)


def merged_live(reports: Sequence[LiveReport], since: float) -> LiveReport:
    """The workers' samples as one server's: each sample of the first worker with those of the others that were the
    latest then. Counters that a worker lost with its life fall, as those of one server do when it is started
    again."""
    if not reports:
        return LiveReport(sample_s=1.0, samples=())
    places = [0] * len(reports)
    merged = []
    for sample in reports[0].samples:
        together = [sample]
        for number, report in enumerate(reports[1:], start=1):
            samples = report.samples
            while places[number] + 1 < len(samples) and samples[places[number] + 1].at <= sample.at:
                places[number] += 1
            if samples:
                together.append(samples[places[number]])
        if sample.at > since:
            merged.append(_sum(sample.at, together))
    return LiveReport(sample_s=reports[0].sample_s, samples=tuple(merged))


def _sum(at: float, samples: Sequence[LiveSample]) -> LiveSample:
    total, total_if_known = partial(_total, samples), partial(_total_if_known, samples)

    def by_name(name: str) -> dict[str, int]:
        found: dict[str, int] = {}
        for each in samples:
            for key, value in vars(each)[name].items():
                found[key] = found.get(key, 0) + value
        return found

    return LiveSample(
        at=at,
        sampled_tokens=total("sampled_tokens"),
        turns=total("turns"),
        calls_in_flight=total("calls_in_flight"),
        engine_waiting=total_if_known("engine_waiting"),
        episodes=by_name("episodes"),
        ended=by_name("ended"),
        sandboxes_in_use=total_if_known("sandboxes_in_use"),
        sandboxes_warm=total_if_known("sandboxes_warm"),
        journal_bytes=total("journal_bytes"),
        journal_queued_bytes=total("journal_queued_bytes"),
    )


def merged_load(loads: Sequence[ServerLoad], server_id: str, refusal: str | None) -> ServerLoad:
    """``loads``: of the workers that are there, one at least. ``refusal``: why the whole server takes no new
    episodes, where its workers do not say it."""

    total, total_if_known = partial(_total, loads), partial(_total_if_known, loads)
    first, refusals = loads[0], [each.refusal for each in loads if each.refusal is not None]
    if refusal is None and len(refusals) == len(loads):
        refusal = "; ".join(dict.fromkeys(refusals))
    return ServerLoad(
        server_id=server_id,
        release=first.release,
        node=first.node,
        draining=any(each.draining for each in loads),
        drained=all(each.drained for each in loads),
        refusal=refusal,
        open=total("open"),
        max_open=total("max_open"),
        queued=total("queued"),
        running=total("running"),
        max_running=total("max_running"),
        grading=total("grading"),
        gradings_waiting=total("gradings_waiting"),
        grading_places=total("grading_places"),
        sandboxes_in_use=total_if_known("sandboxes_in_use"),
        sandboxes_warm=total_if_known("sandboxes_warm"),
        max_sandboxes=total_if_known("max_sandboxes"),
        memory_available_bytes=first.memory_available_bytes,  # all are on one machine
        memory_bytes=first.memory_bytes,
        images=tuple(dict.fromkeys(image for each in loads for image in each.images)),
    )


def _total(parts: Sequence[Model], name: str) -> int:
    return sum(vars(each)[name] for each in parts)


def _total_if_known(parts: Sequence[Model], name: str) -> int | None:
    known = [vars(each)[name] for each in parts if vars(each)[name] is not None]
    return sum(known) if known else None
