"""The spans of episodes as OpenTelemetry's, exported by OTLP over HTTP when an episode has ended.

Nothing is exported while an episode runs, so tracing costs its calls nothing; the ids are derived
(``trace_context``), so an engine that traces names spans that come later. A collector that is slow or gone delays
nobody: episodes whose export fails are counted and logged. Imported only where ``tracing.otlp`` is on, because
OpenTelemetry is an extra.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from importlib.metadata import version

import anyio
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link, SpanContext, SpanKind, Status, StatusCode, TraceFlags

from turnstile.models import Episode, Span, SpanReport
from turnstile.models import SpanKind as Kind
from turnstile_server.errors import NotFound, TooManyCalls
from turnstile_server.observability.bounds import TracingBounds
from turnstile_server.settings import TracingSettings
from turnstile_server.threads import result_of
from turnstile_server.trace_context import TraceContext

_LOG = logging.getLogger(__name__)
_SCOPE = InstrumentationScope("turnstile", version("turnstile-rl"))
_NS = 1_000_000_000
_FOLLOW_AGAIN_S = 1.0

Attributes = dict[str, str | bool | int | float | Sequence[str]]


@dataclass(frozen=True, slots=True)
class ModelNames:
    """Provider and model, as the semantic conventions for generative AI call them."""

    provider: str
    model: str


class TraceExport:
    """Exports each episode that ends while this runs.

    ``changes`` subscribes to changes of status; ``report`` gives an episode's spans, and raises NotFound for one
    that was deleted meanwhile. ``exporter`` None: OTLP, as the standard variables say.
    """

    def __init__(
        self,
        changes: Callable[[], AsyncIterator[Episode]],
        report: Callable[[str], Awaitable[SpanReport]],
        names: ModelNames,
        settings: TracingSettings,
        exporter: SpanExporter | None = None,
    ) -> None:
        self._changes = changes
        self._report = report
        self._names = names
        self._bounds = settings.bounds_of(TracingBounds)
        self._exporter = exporter or OTLPSpanExporter()
        self._resource = Resource.create({"service.name": "turnstile", "service.version": version("turnstile-rl")})
        self._running: set[str] = set()
        """Whose end is exported when it comes; later changes of an ended episode are not."""
        self._waiting: deque[Episode] = deque()
        self._news = anyio.Event()
        self._lost = 0
        self._sending: Future[None] | None = None
        """The export of the first that waits."""

    async def run(self) -> None:
        """Until it is cancelled; then ``shutdown_s`` are left for what has ended."""
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._follow)
                while True:
                    await self._news.wait()
                    self._news = anyio.Event()
                    await self._export_waiting()
        finally:
            with anyio.move_on_after(self._bounds.shutdown_s, shield=True):
                await self._export_waiting()
            _in_thread(self._exporter.shutdown)  # an export under way does not try again
            if self._waiting:
                _LOG.warning("%d episodes were not exported: the server stopped", len(self._waiting))

    async def _follow(self) -> None:
        while True:
            try:
                async for episode in self._changes():
                    self._note(episode)
            except TooManyCalls as error:
                _LOG.warning("traces are not exported now: %s", error.message)
            await anyio.sleep(_FOLLOW_AGAIN_S)  # it lagged behind, or the server stops

    def _note(self, episode: Episode) -> None:
        if not episode.status.ended:
            self._running.add(episode.episode_id)
            return
        if episode.episode_id not in self._running:
            return
        self._running.discard(episode.episode_id)
        if len(self._waiting) >= self._bounds.max_queued:
            self._lost += 1
            _LOG.warning("%d episodes were not exported: the collector is too slow", self._lost)
            return
        self._waiting.append(episode)
        self._news.set()

    async def _export_waiting(self) -> None:
        while self._waiting:
            episode = self._waiting[0]
            try:
                self._sending = self._sending or await self._export(episode)
                if self._sending is not None:
                    await result_of(self._sending)
            except NotFound:  # deleted at once
                pass
            except Exception:  # noqa: BLE001 - the boundary to a collector: no trace is worth the other ones
                _LOG.exception(
                    "the trace of an episode was not exported", extra={"episode_id": episode.episode_id}
                )
            self._sending = None
            self._waiting.popleft()

    async def _export(self, episode: Episode) -> Future[None] | None:
        """Begins it; None for one that is not sampled. Raises NotFound."""
        context = TraceContext.of(episode.episode_id, episode.traceparent, exported=True)
        assert context is not None
        if not context.sampled:
            return None
        report = await self._report(episode.episode_id)

        def export() -> None:
            spans = list(EpisodeTrace(episode, report, context, self._names, self._resource).spans())
            for start in range(0, len(spans), self._bounds.batch_spans):
                batch = spans[start : start + self._bounds.batch_spans]
                if self._exporter.export(batch) is not SpanExportResult.SUCCESS:
                    raise ConnectionError("the collector did not take the spans")

        return _in_thread(export)


def _in_thread(work: Callable[[], None]) -> Future[None]:
    """Begins the work in a thread that the process does not wait for at its end: a collector that takes a request
    and never answers holds it for ``OTEL_EXPORTER_OTLP_TIMEOUT``."""
    done: Future[None] = Future()

    def run() -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - whoever waits for the result has it
            done.set_exception(error)
        else:
            done.set_result(None)

    threading.Thread(target=run, name="traces", daemon=True).start()
    return done


class EpisodeTrace:
    """One episode's spans as OpenTelemetry's: the episode at the top, below the trainer's span if it named one."""

    def __init__(
        self, episode: Episode, report: SpanReport, context: TraceContext, names: ModelNames, resource: Resource
    ) -> None:
        self._episode = episode
        self._report = report
        self._context = context
        self._names = names
        self._resource = resource

    def spans(self) -> Iterator[ReadableSpan]:
        """The episode's first."""
        links = self._links()
        yield self._root()
        for span in self._report.spans:
            if span.end_s is not None:
                yield self._converted(span, links.get(span.span_id, ()))

    def _root(self) -> ReadableSpan:
        episode, context = self._episode, self._context
        attributes: Attributes = {
            "gen_ai.conversation.id": episode.episode_id,
            "gen_ai.agent.name": episode.agent,
            "turnstile.rollout_id": episode.rollout_id,
            "turnstile.status": episode.status.value,
        }
        optional = {
            "turnstile.task": episode.task.id,
            "turnstile.group_id": episode.group_id,
            "turnstile.reward": episode.reward,
            "error.type": None if episode.error is None else episode.error.type,
        }
        attributes |= {name: value for name, value in optional.items() if value is not None}
        parent = None if context.parent_id is None else self._span_context(context.parent_id, remote=True)
        return self._made(
            f"episode {episode.task.id or 'inline'}",
            "",
            parent,
            (0.0, episode.timings.ended_s or 0.0),
            attributes,
            error=None if episode.error is None else episode.error.type,
        )

    def _converted(self, span: Span, links: Sequence[Link]) -> ReadableSpan:
        name, kind, attributes = self._described(span)
        attributes |= {f"turnstile.{key}": value for key, value in span.attributes.items()}
        if span.error is not None:
            attributes["error.type"] = span.error
        parent = self._span_context(self._context.span_id(span.parent_id or ""))
        assert span.end_s is not None
        times = (span.start_s, span.end_s)
        return self._made(name, span.span_id, parent, times, attributes, kind, links, span.error)

    def _described(self, span: Span) -> tuple[str, SpanKind, Attributes]:
        """Name, kind and attributes by the semantic conventions for generative AI, where they have some."""
        conversation = {"gen_ai.conversation.id": self._episode.episode_id}
        match span.kind:
            case Kind.MODEL:
                return f"chat {self._names.model}", SpanKind.CLIENT, {**conversation, **self._of_model(span)}
            case Kind.TOOL:
                of_tool = {"gen_ai.operation.name": "execute_tool", "gen_ai.tool.name": span.name}
                return f"execute_tool {span.name}", SpanKind.INTERNAL, {**conversation, **of_tool}
            case Kind.AGENT:
                of_agent = {"gen_ai.operation.name": "invoke_agent", "gen_ai.agent.name": span.name}
                return f"invoke_agent {span.name}", SpanKind.INTERNAL, {**conversation, **of_agent}
            case kind:
                shown = kind.value if span.name in ("", kind.value) else f"{kind.value} {span.name}"
                return shown, SpanKind.INTERNAL, {}

    def _of_model(self, span: Span) -> Attributes:
        found: Attributes = {
            "gen_ai.operation.name": "chat",
            "gen_ai.provider.name": self._names.provider,
            "gen_ai.request.model": self._names.model,
        }
        if span.turn_id is not None:
            found["gen_ai.response.id"] = span.turn_id
        said: Mapping[str, str] = {
            "prompt_tokens": "gen_ai.usage.input_tokens",
            "completion_tokens": "gen_ai.usage.output_tokens",
            "status": "http.response.status_code",
        }
        found |= {new: span.attributes[old] for old, new in said.items() if old in span.attributes}
        if "finish_reason" in span.attributes:
            found["gen_ai.response.finish_reasons"] = [str(span.attributes["finish_reason"])]
        return found

    def _links(self) -> dict[str, tuple[Link, ...]]:
        """Links from the first call of each sub-agent to the last one before it of the agent that started it."""
        links: dict[str, tuple[Link, ...]] = {}
        latest: dict[str, Span] = {}
        for span in self._report.spans:
            thread = span.attributes.get("thread")
            if span.kind is not Kind.MODEL or not isinstance(thread, str):
                continue
            parent = latest.get(str(span.attributes.get("thread_parent", "")))
            if thread not in latest and parent is not None:
                links[span.span_id] = (Link(self._span_context(self._context.span_id(parent.span_id))),)
            latest[thread] = span
        return links

    def _span_context(self, span_id: str, *, remote: bool = False) -> SpanContext:
        flags = TraceFlags(TraceFlags.SAMPLED)
        return SpanContext(int(self._context.trace_id, 16), int(span_id, 16), remote, flags)

    def _made(
        self,
        name: str,
        span_id: str,
        parent: SpanContext | None,
        times: tuple[float, float],
        attributes: Attributes,
        kind: SpanKind = SpanKind.INTERNAL,
        links: Sequence[Link] = (),
        error: str | None = None,
    ) -> ReadableSpan:
        start, end = (round((self._report.started_at + at) * _NS) for at in times)
        return ReadableSpan(
            name=name,
            context=self._span_context(self._context.span_id(span_id)),
            parent=parent,
            resource=self._resource,
            attributes=attributes,
            links=links,
            kind=kind,
            status=Status(StatusCode.UNSET) if error is None else Status(StatusCode.ERROR, error),
            start_time=start,
            end_time=end,
            instrumentation_scope=_SCOPE,
        )
