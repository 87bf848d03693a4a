"""The export of traces to a collector that speaks OTLP over HTTP, and W3C Trace Context on its way through."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest
from conversation import END, auth, body, url
from gate_support import Stage, says, staged
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span as OtlpSpan
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from test_recorded_spans import EPISODE

from bounded import bounded
from turnstile.models import Episode, EpisodeStatus, SpanReport
from turnstile_server.gate.episode_limits import ConversationHeaders
from turnstile_server.observability.otel import ModelNames, TraceExport
from turnstile_server.settings import TracingSettings
from turnstile_server.trace_context import TraceContext, is_traceparent
from waiting import wait_until

pytestmark = pytest.mark.anyio

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
TRACEPARENT = f"00-{TRACE}-{PARENT}-01"


class Collector:
    """What it was sent. ``status``: what it answers."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.requests: list[ExportTraceServiceRequest] = []
        self.headers: list[dict[str, str]] = []
        self.status = 200

    @property
    def spans(self) -> list[OtlpSpan]:
        scopes = [scope for one in self.requests for part in one.resource_spans for scope in part.scope_spans]
        return [span for scope in scopes for span in scope.spans]

    async def episodes(self, count: int = 1) -> list[OtlpSpan]:
        """All spans, once so many episodes have come."""
        await wait_until(lambda: sum(span.name.startswith("episode ") for span in self.spans) >= count)
        return self.spans


@contextmanager
def collecting() -> Iterator[Collector]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            data = self.rfile.read(int(self.headers["content-length"]))
            if collector.status == 200:
                collector.requests.append(ExportTraceServiceRequest.FromString(data))
                collector.headers.append({name.lower(): value for name, value in self.headers.items()})
            self.send_response(collector.status)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            return

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    collector = Collector(f"http://127.0.0.1:{server.server_port}")
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield collector
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    with collecting() as found:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", found.address)
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-team=rl")
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
        monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment=test")
        yield found


def attributes(span: OtlpSpan) -> dict[str, Any]:
    return {one.key: getattr(one.value, one.value.WhichOneof("value")) for one in span.attributes}


async def call(stage: Stage, episode: dict[str, Any], text: str, **headers: str) -> httpx.Response:
    async with httpx.AsyncClient(headers={**auth(episode), **headers}, timeout=30) as client:
        return await client.post(url(episode), json=body(messages=[{"role": "user", "content": text}]))


def hm(stage: Stage) -> None:
    stage.engine.answers = [says([*stage.encode("hm"), *stage.encode(END)])]


async def create(stage: Stage, header: str | None = None, **fields: Any) -> dict[str, Any]:
    headers = {} if header is None else {"traceparent": header}
    made = await stage.control.post("/episodes", json={"task": {"instruction": "t"}, **fields}, headers=headers)
    assert made.status_code == 201, made.text
    created: dict[str, Any] = made.json()
    return created


async def test_an_ended_episode_is_a_trace_below_the_trainers_span(
    tiny_model: Path, tmp_path: Path, collector: Collector
) -> None:
    async with staged(tiny_model, tmp_path, tracing={"otlp": True, "batch_spans": 3}) as stage:
        hm(stage)
        episode = await create(stage, TRACEPARENT)
        assert (await stage.get(episode))["traceparent"] == TRACEPARENT
        assert (await call(stage, episode, "hi")).status_code == 200
        assert (await call(stage, episode, "x " * 100_000)).status_code == 400
        assert collector.spans == []
        await stage.post(episode, "finish")
        report = await stage.get(episode, "/spans")
        (turn,) = (await stage.get(episode, "/turns"))["turns"]
        told = stage.engine.calls[0].origin.traceparent
    spans = collector.spans  # the stop has sent them all; the episode's own is in the first of several requests
    assert len(collector.requests) == -(-len(spans) // 3)
    assert {one.trace_id.hex() for one in spans} == {TRACE}
    (root,) = [one for one in spans if one.name.startswith("episode ")]
    assert root.parent_span_id.hex() == PARENT
    known = {one.span_id for one in spans}
    assert len(known) == len(spans) == len(report["spans"]) + 1
    assert {one.parent_span_id for one in spans if one is not root} <= known
    assert attributes(root)["gen_ai.conversation.id"] == episode["episode_id"]
    chat, refused = sorted((one for one in spans if one.name.startswith("chat ")), key=lambda one: one.status.code)
    assert told == f"00-{TRACE}-{chat.span_id.hex()}-01", "the engine is told of the call's own span"
    of_chat = attributes(chat)
    assert (of_chat["gen_ai.operation.name"], of_chat["gen_ai.response.id"]) == ("chat", turn["turn_id"])
    assert of_chat["gen_ai.usage.output_tokens"] == len(turn["completion_ids"])
    assert of_chat["gen_ai.usage.input_tokens"] == len(turn["context_ids"])
    assert attributes(refused)["error.type"] == "context_length_exceeded"
    assert (refused.status.code, refused.status.message) == (2, "context_length_exceeded")
    (model,) = [one for one in report["spans"] if one["span_id"] == turn["turn_id"]]
    began = (report["started_at"] + model["start_s"]) * 1e9
    assert chat.start_time_unix_nano == pytest.approx(began, abs=1e5)
    assert {one.name for one in spans if one.parent_span_id == chat.span_id} >= {"render", "decode", "commit"}
    resource = {
        one.key: one.value.string_value for one in collector.requests[0].resource_spans[0].resource.attributes
    }
    assert (resource["service.name"], resource["deployment.environment"]) == ("turnstile", "test")
    assert collector.headers[0]["x-team"] == "rl"


async def test_sub_agents_are_linked_to_the_call_that_started_them(
    tiny_model: Path, tmp_path: Path, collector: Collector
) -> None:
    async with staged(tiny_model, tmp_path, tracing={"otlp": True}) as stage:
        hm(stage)
        episode = await create(stage)
        assert stage.apps.tools is not None
        session = stage.apps.tools.open_episode(episode["episode_id"], episode["episode_key"])  # type: ignore[attr-defined]
        session.conversation_headers = ConversationHeaders("x-thread", "x-parent")
        await call(stage, episode, "main", **{"x-thread": "main"})
        await call(stage, episode, "help", **{"x-thread": "helper", "x-parent": "main"})
        await stage.post(episode, "finish")
        spans = await collector.episodes()
    main, helper = sorted(
        (one for one in spans if one.name.startswith("chat ")), key=lambda one: one.start_time_unix_nano
    )
    assert [link.span_id for link in helper.links] == [main.span_id]
    assert not main.links


async def test_an_episode_without_a_traceparent_is_a_trace_of_its_own(
    tiny_model: Path, tmp_path: Path, collector: Collector
) -> None:
    async with staged(tiny_model, tmp_path, tracing={"otlp": True}) as stage:
        for _ in range(2):
            await stage.post(await create(stage, "00-not-w3c's-01"), "finish")
        spans = await collector.episodes(2)
    roots = [one for one in spans if not one.parent_span_id]
    assert len({one.trace_id for one in spans}) == len(roots) == 2


async def test_a_trace_that_is_not_sampled_is_not_exported(
    tiny_model: Path, tmp_path: Path, collector: Collector
) -> None:
    async with staged(tiny_model, tmp_path, tracing={"otlp": True}) as stage:
        await stage.post(await create(stage, f"00-{TRACE}-{PARENT}-00"), "finish")
        await stage.post(await create(stage), "finish")
        spans = await collector.episodes()
    assert TRACE not in {one.trace_id.hex() for one in spans}


@pytest.mark.slow
async def test_what_has_ended_is_exported_before_the_server_is_gone_and_no_collector_holds_it_up(
    tiny_model: Path, tmp_path: Path, collector: Collector
) -> None:
    async with staged(tiny_model, tmp_path / "a", tracing={"otlp": True}) as stage:
        for _ in range(5):
            await stage.post(await create(stage), "finish")
    assert sum(one.name.startswith("episode ") for one in collector.spans) == 5
    collector.status = 400
    async with staged(tiny_model, tmp_path / "b", tracing={"otlp": True, "shutdown_s": 0.1}) as stage:
        lost = await create(stage)
        await stage.post(lost, "finish")
        assert (await stage.get(lost))["status"] == "completed"


class StuckExporter(SpanExporter):
    """Takes what it is given once it is let go."""

    def __init__(self) -> None:
        self.asked = threading.Event()
        self.go = threading.Event()
        self.taken: list[str] = []

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.asked.set()
        self.go.wait(30)
        self.taken += [span.name for span in spans]
        return SpanExportResult.SUCCESS


@pytest.mark.parametrize("slow", [False, True])
async def test_a_collector_that_hangs_costs_traces_and_nothing_else(
    slow: bool, caplog: pytest.LogCaptureFixture
) -> None:
    send, receive = anyio.create_memory_object_stream[Episode](100)
    exporter = StuckExporter()

    async def changes() -> AsyncIterator[Episode]:
        async for episode in receive:
            yield episode
        await anyio.sleep_forever()

    async def report(episode_id: str) -> SpanReport:
        return SpanReport(episode_id=episode_id, started_at=0.0)

    settings = bounded(TracingSettings, max_queued=2, shutdown_s=0.05 if slow else 20.0)
    export = TraceExport(changes, report, ModelNames("e", "m"), settings, exporter)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(export.run)
        for number in range(4):
            for status in (EpisodeStatus.RUNNING, EpisodeStatus.COMPLETED, EpisodeStatus.COMPLETED):
                await send.send(EPISODE.model_copy(update={"episode_id": f"e{number}", "status": status}))
        await wait_until(lambda: "2 episodes were not exported" in caplog.text)
        assert exporter.asked.is_set()
        if not slow:
            exporter.go.set()
        tasks.cancel_scope.cancel()
    sending = [thread for thread in threading.enumerate() if thread.name == "traces" and not exporter.go.is_set()]
    assert all(thread.daemon for thread in sending), "the process does not wait for a collector at its end"
    assert bool(sending) == slow
    exporter.go.set()
    if slow:
        assert "2 episodes were not exported: the server stopped" in caplog.text
    else:
        assert exporter.taken == ["episode inline"] * 2  # the one that was under way is not sent again


async def test_a_traceparent_is_passed_on_as_it_is_where_nothing_is_exported(
    tiny_model: Path, tmp_path: Path
) -> None:
    async with staged(tiny_model, tmp_path) as stage:
        hm(stage)
        for field, header in ((None, TRACEPARENT), (TRACEPARENT, None)):
            episode = await create(stage, header, traceparent=field)
            await call(stage, episode, "hi")
            assert stage.engine.calls[-1].origin.traceparent == TRACEPARENT
        await call(stage, await create(stage), "hi")
        assert stage.engine.calls[-1].origin.traceparent is None
        wrong = await stage.control.post("/episodes", json={"task": {"instruction": "t"}, "traceparent": "no"})
        assert wrong.status_code == 422
        first = await create(stage, TRACEPARENT, idempotency_key="k")
        again = await stage.control.post(
            "/episodes", json={"task": {"instruction": "t"}, "idempotency_key": "k"}, headers={"traceparent": ""}
        )
        assert (again.status_code, again.json()["episode_id"]) == (200, first["episode_id"])


@pytest.mark.slow
def test_without_the_setting_nothing_of_the_sdk_is_imported() -> None:
    look = (
        "import sys, turnstile_server.app; "
        "print([name for name in sys.modules if name.startswith(('opentelemetry.sdk', 'opentelemetry.exporter'))])"
    )
    done = subprocess.run([sys.executable, "-c", look], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


@pytest.mark.parametrize(
    "text",
    ["", TRACEPARENT.upper(), TRACEPARENT + "-x", f"00-{'0' * 32}-{PARENT}-01", f"00-{TRACE}-{'0' * 16}-01", "01"],
)
def test_what_is_no_traceparent_is_none(text: str) -> None:
    assert not is_traceparent(text)
    assert TraceContext.of("ep", "no", exported=False) is None
