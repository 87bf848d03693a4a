"""Metrics and samples of several workers read as those of one server."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from turnstile.models import EpisodeStatus, LiveReport, LiveSample, ServerLoad
from turnstile_server.observability.metrics import Metrics
from turnstile_server.workers.kept_counters import KeptCounters
from turnstile_server.workers.merged_metrics import merged_exposition, merged_live, merged_load


def values(exposition: bytes) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(exposition.decode())
        for sample in family.samples
    }


def worker(calls: int, running: int) -> str:
    metrics = Metrics()
    for _ in range(calls):
        metrics.call_started()
        metrics.call_ended("chat", 200, 0.02, 0.01)
    for _ in range(running):
        metrics.episode_moved(None, EpisodeStatus.RUNNING)
    metrics.control_request("/register/state", 200)
    return metrics.exposition().decode()


def test_counters_histograms_and_amounts_are_summed() -> None:
    front = Metrics()
    front.control_request("/episodes", 201)
    found = values(merged_exposition(front.exposition().decode(), [worker(2, 1), worker(3, 4)]))
    assert found["turnstile_calls_total", (("dialect", "chat"), ("status", "200"))] == 5
    assert found["turnstile_call_seconds_count", (("dialect", "chat"),)] == 5
    assert found["turnstile_call_seconds_bucket", (("dialect", "chat"), ("le", "0.025"))] == 5
    assert found["turnstile_call_seconds_bucket", (("dialect", "chat"), ("le", "0.01"))] == 0
    assert found["turnstile_episodes", (("status", "running"),)] == 5
    assert [value for (name, _), value in found.items() if name == "turnstile_server_info"] == [1]
    routes = {labels for name, labels in found if name == "turnstile_control_requests_total"}
    assert routes == {(("route", "/episodes"), ("status", "201"))}, "each request is counted once, by the front"


def test_a_sum_does_not_fall_when_a_worker_dies_and_each_life_counts_once() -> None:
    kept = KeptCounters()
    calls = ("turnstile_calls_total", (("dialect", "chat"), ("status", "200")))
    front = Metrics().exposition().decode()

    def scraped(*told: tuple[int, int, str]) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
        for each in told:
            kept.told(*each)
        texts = [text for _, _, text in told] + kept.of_the_gone({number for number, _, _ in told})
        return values(merged_exposition(front, texts))

    assert scraped((0, 1, worker(2, 1)), (1, 1, worker(3, 4)))[calls] == 5
    without = scraped((0, 1, worker(4, 1)))  # worker 1 is being started again
    assert without[calls] == 7
    assert without["turnstile_episodes", (("status", "running"),)] == 1, "what ran there does not run any more"
    assert scraped((0, 1, worker(4, 1)), (1, 2, worker(1, 0)))[calls] == 8
    assert scraped((0, 2, worker(1, 1)), (1, 3, worker(2, 0)))[calls] == 4 + 3 + 1 + 1 + 2
    assert scraped()[calls] == 11
    assert (
        scraped((0, 2, worker(1, 1)), (1, 3, worker(2, 0)))["turnstile_call_seconds_count", (("dialect", "chat"),)]
        == 11
    )


def test_one_worker_s_metrics_stay_as_they_are() -> None:
    alone, merged = (
        values(worker(3, 2).encode()),
        values(merged_exposition(Metrics().exposition().decode(), [worker(3, 2)])),
    )
    counted = {
        key: value for key, value in alone.items() if "control_requests" not in key[0] and "_created" not in key[0]
    }
    assert {key: merged[key] for key in counted} == counted


def test_what_all_workers_say_of_the_engines_they_share_is_not_summed() -> None:
    text = "# TYPE turnstile_engine_weight_versions gauge\nturnstile_engine_weight_versions {}\n"
    texts = [text.format(3), text.format(4)]
    assert values(merged_exposition("", texts))["turnstile_engine_weight_versions", ()] == 4


def sample(at: float, turns: int, waiting: int | None) -> LiveSample:
    return LiveSample(
        at=at,
        sampled_tokens=0,
        turns=turns,
        calls_in_flight=1,
        engine_waiting=waiting,
        episodes={"running": 1},
        ended={"completed": turns},
        sandboxes_in_use=None,
        sandboxes_warm=None,
        journal_bytes=0,
        journal_queued_bytes=0,
    )


def test_samples_are_joined_with_what_the_others_had_last() -> None:
    first = LiveReport(sample_s=2, samples=(sample(10, 1, None), sample(12, 2, None), sample(14, 3, None)))
    second = LiveReport(sample_s=2, samples=(sample(11, 10, 5), sample(13, 20, 6)))
    merged = merged_live([first, second], since=10)
    assert [(each.at, each.turns, each.engine_waiting) for each in merged.samples] == [(12, 12, 5), (14, 23, 6)]
    assert merged.samples[-1].episodes == {"running": 2}
    assert merged.samples[-1].ended == {"completed": 23}
    assert merged_live([first], since=0) == first


def load(**changes: object) -> ServerLoad:
    fields: dict[str, object] = {
        "server_id": "srv_worker", "release": "1", "node": "here", "draining": False, "drained": False,
        "refusal": None, "open": 3, "max_open": 10, "queued": 1, "running": 2, "max_running": 4,
        "grading": 0, "gradings_waiting": 0, "grading_places": 2, "sandboxes_in_use": 1, "sandboxes_warm": 0,
        "max_sandboxes": 8,
        "memory_available_bytes": 5, "memory_bytes": 9, "images": ("a", "b"),
    }  # fmt: skip
    return ServerLoad.model_validate(fields | changes)


def test_the_load_of_all_workers_is_that_of_one_server() -> None:
    found = merged_load([load(), load(images=("b", "c"), running=4, sandboxes_in_use=None)], "srv_all", None)
    assert (found.server_id, found.open, found.max_running, found.free) == ("srv_all", 6, 8, 0)
    assert (found.sandboxes_in_use, found.memory_bytes, found.images) == (1, 9, ("a", "b", "c"))
    assert (found.refusal, found.draining, found.drained) == (None, False, False)


def test_a_server_refuses_only_where_all_its_workers_do_and_is_drained_once_all_are() -> None:
    full, draining = load(refusal="the disk is full"), load(draining=True, drained=True, refusal="it drains")
    assert merged_load([full, load()], "srv", None).refusal is None
    assert merged_load([full, full], "srv", None).refusal == "the disk is full"
    assert merged_load([full, load()], "srv", "the server drains").refusal == "the server drains"
    assert not merged_load([draining, load(draining=True)], "srv", None).drained
    assert merged_load([draining, draining], "srv", None).drained
