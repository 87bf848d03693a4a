"""Metrics: what is counted, under which name."""

from __future__ import annotations

import socket
from importlib.metadata import version

from turnstile.models import (
    Break,
    BreakReason,
    EpisodeStatus,
    Message,
    SamplingUsed,
    Turn,
    TurnTimings,
    WeightSpan,
)
from turnstile_server.observability.metrics import Metrics


def lines(metrics: Metrics) -> set[str]:
    return {line for line in metrics.exposition().decode().splitlines() if not line.startswith("#")}


def test_a_call_counts_by_dialect_and_status_and_leaves_nothing_in_flight() -> None:
    metrics = Metrics()
    metrics.call_started()
    assert "turnstile_calls_in_flight 1.0" in lines(metrics)
    metrics.call_ended("chat", 200, 1.5, 1.0)
    metrics.call_started()
    metrics.call_ended("chat", 400, 0.5)
    found = lines(metrics)
    assert "turnstile_calls_in_flight 0.0" in found
    assert 'turnstile_calls_total{dialect="chat",status="200"} 1.0' in found
    assert 'turnstile_calls_total{dialect="chat",status="400"} 1.0' in found
    assert 'turnstile_call_seconds_sum{dialect="chat"} 2.0' in found
    assert "turnstile_engine_seconds_count 1.0" in found
    assert "turnstile_overhead_seconds_sum 0.5" in found


def test_it_says_on_which_host_it_is_counted() -> None:
    found = f'turnstile_server_info{{node="{socket.gethostname()}",release="{version("turnstile-rl")}"}} 1.0'
    assert found in lines(Metrics())


def test_episodes_are_a_gauge_by_status_until_they_end_and_then_a_counter() -> None:
    metrics = Metrics()
    metrics.episode_moved(None, EpisodeStatus.RUNNING)
    metrics.episode_moved(EpisodeStatus.RUNNING, EpisodeStatus.GRADING)
    metrics.episode_moved(None, EpisodeStatus.RUNNING)
    metrics.episode_moved(EpisodeStatus.GRADING, EpisodeStatus.COMPLETED)
    metrics.episode_moved(None, EpisodeStatus.COMPLETED)  # loaded at start: it ended in another life
    found = lines(metrics)
    assert 'turnstile_episodes{status="running"} 1.0' in found
    assert 'turnstile_episodes{status="grading"} 0.0' in found
    assert 'turnstile_episodes_ended_total{status="completed"} 1.0' in found


def a_turn() -> Turn:
    return Turn(
        turn_id="turn_1",
        episode_id="ep_1",
        parent_id=None,
        seq=0,
        dialect="chat",
        context_ids=[1],
        completion_ids=[2, 3],
        logprobs=[-0.1, -0.2],
        weight_spans=(WeightSpan(start=0, end=2, version="v1"),),
        finish_reason="stop",
        sampling=SamplingUsed(max_new_tokens=2),
        template_hash="t",
        tools_key="k",
        request_key="r",
        new_messages=(Message("user", "hello"),),
        reply=Message("assistant", "hi"),
        break_=Break(reason=BreakReason.HISTORY_EDITED),
        rerendered_tokens=5,
        timings=TurnTimings(started_at=0.0),
    )


def test_a_turn_counts_its_tokens_its_bytes_and_its_break() -> None:
    metrics = Metrics()
    metrics.turn_committed(a_turn(), tokenized_bytes=40)
    found = lines(metrics)
    assert "turnstile_tokens_sampled_total 2.0" in found
    assert "turnstile_tokenized_bytes_total 40.0" in found
    assert "turnstile_tokens_rerendered_total 5.0" in found
    assert 'turnstile_breaks_total{reason="history_edited"} 1.0' in found


def test_tokens_that_are_not_trained_are_counted_by_reason() -> None:
    metrics = Metrics()
    metrics.tokens_trained(7)
    metrics.tokens_untrained("superseded", 3)
    metrics.tokens_discarded("aborted", 2)
    found = lines(metrics)
    assert "turnstile_tokens_trained_total 7.0" in found
    assert 'turnstile_tokens_untrained_total{reason="superseded"} 3.0' in found
    assert 'turnstile_tokens_discarded_total{reason="aborted"} 2.0' in found


def test_two_servers_in_one_process_do_not_mix() -> None:
    first, second = Metrics(), Metrics()
    first.tokens_trained(1)
    assert "turnstile_tokens_trained_total 0.0" in lines(second)
