"""The places of gradings: a wait for one is a span of its own, is counted, and is no part of the grading."""

from __future__ import annotations

import time

import anyio
import pytest

from turnstile.models import SpanKind, seconds_by_part
from turnstile.models.spans import seconds_of
from turnstile_server.grading.places import GradingPlaces
from turnstile_server.observability.grading_metrics import GradingCollector
from turnstile_server.observability.metrics import Metrics
from turnstile_server.spans import SpanRecorder

pytestmark = pytest.mark.anyio


async def test_a_wait_is_a_span_and_a_metric() -> None:
    places, metrics, spans = GradingPlaces(1), Metrics(), SpanRecorder(time.time(), 10)
    metrics.watch(GradingCollector(lambda: places.waiting))
    done = anyio.Event()

    async def graded(name: str) -> None:
        with spans.span(SpanKind.GRADING, name) as span:
            async with places.place(span):
                await done.wait()

    async with anyio.create_task_group() as tasks:
        for name in ("first", "second", "third"):
            tasks.start_soon(graded, name)
        await anyio.wait_all_tasks_blocked()
        assert b"turnstile_gradings_waiting 2.0" in metrics.exposition()
        await anyio.sleep(0.05)
        done.set()
    assert b"turnstile_gradings_waiting 0.0" in metrics.exposition()
    waits = [span for span in spans.spans() if span.kind is SpanKind.GRADING_QUEUE]
    assert len(waits) == 3
    parts = seconds_by_part(spans.spans())
    assert parts.grading_queue >= 0.05
    assert parts.grading < parts.grading_queue


async def test_a_cancelled_wait_takes_no_place() -> None:
    places = GradingPlaces(1)
    async with places.place(None):
        with anyio.move_on_after(0.01):
            async with places.place(None):
                raise AssertionError("there was none")
    with anyio.fail_after(5):
        async with places.place(None):
            assert places.waiting == 0


def test_waiting_and_grading_add_up_and_a_regrades_wait_does_not_count() -> None:
    parts = seconds_of(
        {SpanKind.GRADING: [(10.0, 20.0)], SpanKind.GRADING_QUEUE: [(11.0, 13.0), (12.0, 16.0), (40.0, 45.0)]}
    )
    assert (parts.grading_queue, parts.grading) == (5.0, 5.0)
