"""``deploy/``: the Grafana dashboard and the alert rules ask for metrics and labels that a server really has, in
PromQL that a parser of Prometheus's own grammar takes."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import anyio
import httpx
import promql_parser
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families as read_metrics

from control_support import Door, EngineProcess
from local import ROOT
from turnstile.models import EpisodeStatus, Fault
from turnstile.sync import Client
from turnstile_server.engines.fleet.fleet import Fleet
from turnstile_server.engines.protocol import EngineLoad
from turnstile_server.engines.sglang.engine import SGLangEngine
from turnstile_server.engines.versions import WeightVersions
from turnstile_server.observability.fleet_metrics import FleetCollector
from turnstile_server.observability.metrics import Metrics
from turnstile_server.settings import EngineSettings, FleetSettings

DASHBOARD = ROOT / "deploy" / "grafana" / "turnstile.json"
ALERTS = ROOT / "deploy" / "prometheus" / "alerts.yaml"
OF_PROMETHEUS = {"up": {"job", "instance"}}
"""What Prometheus makes itself."""
OF_THE_SCRAPE = {"job", "instance"}
VARIABLES = {"$__rate_interval": "5m", "$instance": ".*"}


def _dashboard() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(DASHBOARD.read_text())
    return found


def _queries() -> Iterator[tuple[str, str]]:
    """Where each query stands, and the query."""
    for panel in _dashboard()["panels"]:
        for target in panel.get("targets", ()):
            query = target["expr"]
            for name, value in VARIABLES.items():
                query = query.replace(name, value)
            yield f"{panel['title']} {target['refId']}", query
    for group in yaml.safe_load(ALERTS.read_text())["groups"]:
        for rule in group["rules"]:
            yield rule["alert"], rule["expr"]


QUERIES = dict(_queries())


def _count_all(metrics: Metrics) -> None:
    """Gives every metric with labels a sample."""
    metrics.call_ended("chat", 200, 1.0, 0.5)
    metrics.tokens_discarded("engine_timeout", 1)
    metrics.tokens_untrained("interrupted", 1)
    metrics.stale_episode("finish")
    metrics.episode_moved(EpisodeStatus.RUNNING, EpisodeStatus.COMPLETED)
    metrics.episode_failed(Fault.TASK)
    metrics.regraded("applied")
    metrics.turn_snapshot("kept")
    metrics.control_request("/episodes", 200)
    metrics._breaks.labels("history_edited")
    metrics._cosmetic.labels("whitespace")


async def _fleet_metrics(engine: EngineProcess) -> str:
    """What a server shows of its engines where it spreads its calls over them, and knows their load."""
    settings = EngineSettings(kind="sglang")
    sglang = SGLangEngine("http://embedded", settings, unix_socket=engine.socket)
    fleet = Fleet([("http://embedded", sglang)], settings, FleetSettings(), WeightVersions())
    metrics = Metrics()
    metrics.watch(FleetCollector(fleet))
    await fleet.start()
    try:
        for worker in fleet.roster.workers:
            worker.load = EngineLoad(running=1, waiting=0, kv_used=0.5)  # this engine does not say it
        return metrics.exposition().decode()
    finally:
        await fleet.close()


@pytest.fixture(scope="module")
def labels_of(door: Door, engine: EngineProcess) -> Mapping[str, set[str]]:
    """The names of all metrics that a real server shows, with their labels."""
    with Client(door.url, key=door.key) as client:
        episode = client.create_episode("say hello")
        door.add_turn(episode.episode_id)
        episode.finish()
    answer = httpx.get(f"{door.url}/metrics", headers={"authorization": f"Bearer {door.key}"})
    answer.raise_for_status()
    counted = Metrics()
    _count_all(counted)
    found: defaultdict[str, set[str]] = defaultdict(set)
    shown = answer.text + anyio.run(_fleet_metrics, engine)
    for name in re.findall(r"^# TYPE (\w+) (?:counter|gauge)$", shown, re.MULTILINE):
        found[name] = set()  # of those without a sample yet, too
    for family in read_metrics(shown):
        for sample in family.samples:
            found[sample.name] |= set(sample.labels)
    for family in read_metrics(counted.exposition().decode()):
        for sample in family.samples:
            if sample.name in found:  # only labels are taken from here
                found[sample.name] |= set(sample.labels)
    return {**found, **OF_PROMETHEUS}


def test_every_query_is_promql_about_metrics_and_labels_that_there_are(labels_of: Mapping[str, set[str]]) -> None:
    assert len(QUERIES) > 40
    assert {
        where: _unknown(query, labels_of) for where, query in QUERIES.items() if _unknown(query, labels_of)
    } == {}


@pytest.mark.parametrize(
    ("query", "unknown"),
    [
        ("sum(turnstile_no_such_thing)", ["turnstile_no_such_thing"]),
        ('turnstile_episodes{state="running"}', ["turnstile_episodes{state}"]),
        ("sum by (fault) (rate(turnstile_episodes_ended_total[5m]))", ["turnstile_episodes_ended_total{fault}"]),
        ("turnstile_episodes_ended", ["turnstile_episodes_ended"]),
        ("turnstile_episodes and on (worker) up", ["turnstile_episodes{worker}", "up{worker}"]),
    ],
)
def test_the_check_sees_what_is_wrong(query: str, unknown: list[str], labels_of: Mapping[str, set[str]]) -> None:
    assert _unknown(query, labels_of) == unknown


def test_a_query_that_is_no_promql_is_refused() -> None:
    with pytest.raises(ValueError, match="unclosed left parenthesis"):
        promql_parser.parse("sum by (status (turnstile_episodes)")


def test_legends_name_labels_of_their_query() -> None:
    for panel in _dashboard()["panels"]:
        for target in panel.get("targets", ()):
            for label in re.findall(r"{{(\w+)}}", target["legendFormat"]):
                assert re.search(rf"\b{label}\b", target["expr"]) or label in ("instance", "worker"), target


def test_the_dashboard_has_one_place_for_each_panel_and_no_source_of_its_own() -> None:
    panels = _dashboard()["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    places = [
        (place["x"] + x, place["y"] + y)
        for place in (panel["gridPos"] for panel in panels)
        for x in range(place["w"])
        for y in range(place["h"])
    ]
    assert len(places) == len(set(places))
    assert all(x < 24 for x, _ in places)
    sources = {panel["datasource"]["uid"] for panel in panels if "datasource" in panel}
    assert sources == {"${datasource}"}
    assert all(panel["description"] for panel in panels if panel["type"] != "row")


def test_each_alert_says_what_is_wrong_and_what_to_do() -> None:
    rules = [rule for group in yaml.safe_load(ALERTS.read_text())["groups"] for rule in group["rules"]]
    assert len({rule["alert"] for rule in rules}) == len(rules)
    for rule in rules:
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert set(rule["annotations"]) == {"summary", "description"}
        for page in re.findall(r"docs/[\w/.-]+\.md", str(rule["annotations"])):
            assert (ROOT / Path(page)).is_file(), page


def _unknown(query: str, known: Mapping[str, set[str]]) -> list[str]:
    """Metrics that there are not, and labels that the metrics they are asked of do not have."""
    found: list[str] = []

    def seen(part: Any) -> set[str]:
        """The metrics below ``part``, which is looked at."""
        match part:
            case promql_parser.VectorSelector():
                if part.name not in known:
                    found.append(part.name)
                    return set()
                missing({matcher.name for matcher in part.matchers.matchers}, {part.name})
                return {part.name}
            case promql_parser.MatrixSelector():
                return seen(part.vector_selector)
            case promql_parser.Call():
                return set().union(*map(seen, part.args))
            case promql_parser.AggregateExpr():
                names = seen(part.expr)
                missing(set(part.modifier.labels) if part.modifier is not None else set(), names)
                return names
            case promql_parser.BinaryExpr():
                names = seen(part.lhs) | seen(part.rhs)
                matching = None if part.modifier is None else part.modifier.matching
                missing(set() if matching is None else set(matching.labels), names)
                return names
            case promql_parser.ParenExpr() | promql_parser.UnaryExpr():
                return seen(part.expr)
            case promql_parser.NumberLiteral():
                return set()
        raise AssertionError(f"{type(part).__name__} is not looked at")

    def missing(labels: set[str], names: set[str]) -> None:
        found.extend(
            f"{name}{{{label}}}"
            for name in sorted(names)
            for label in sorted(labels - known[name] - OF_THE_SCRAPE)
        )

    seen(promql_parser.parse(query))
    return found
