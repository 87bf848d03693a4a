"""Records the spans of one episode: what it spent its time on, as it happens.

What must hold: recording changes nothing else (it neither waits nor raises); a span is given to ``keep`` once,
when it has ended; calls and snapshots, of which an agent can make any number, are bounded, and those beyond the
bound are counted; nothing is recorded after ``seal``.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

import orjson

from turnstile.models import Span, SpanKind, new_id
from turnstile.models.spans import Interval
from turnstile_server.errors import TurnstileError

BOUNDED: Final = frozenset({SpanKind.MODEL, SpanKind.TOOL, SpanKind.SNAPSHOT})
"""Kinds of which an agent decides how many there are."""
CANCELLED: Final = "cancelled"
_MAX_NAME: Final = 200
"""Characters of a span's name, and of an attribute that is text: a name of a tool is what the agent calls it."""

Attribute = str | bool | int | float


class OpenSpan:
    """A span that goes on. ``error``: set it where what went wrong raises nothing. ``attributes`` may grow."""

    def __init__(
        self,
        recorder: SpanRecorder,
        kind: SpanKind,
        name: str,
        start_s: float,
        parent_id: str | None,
        turn_id: str | None,
        attributes: dict[str, Attribute],
    ) -> None:
        self.span_id = new_id("span")
        self.error: str | None = None
        self.attributes = attributes
        self._recorder = recorder
        self._kind = kind
        self._name = name
        self._start_s = start_s
        self._parent_id = parent_id
        self._turn_id = turn_id

    @contextmanager
    def child(self, kind: SpanKind, name: str = "", **attributes: Attribute) -> Iterator[OpenSpan]:
        """A span within this one, around the block."""
        with self._recorder.span(kind, name, parent=self) as span:
            span.note(**attributes)
            yield span

    def end(self, error: str | None = None) -> None:
        """No-op where it has ended. ``error``: its type."""
        self.error = error or self.error
        self._recorder._end(self)

    def as_span(self, end_s: float | None) -> Span:
        """The span as it is now."""
        return Span(
            span_id=self.span_id,
            parent_id=self._parent_id,
            kind=self._kind,
            name=_text(self._name),
            start_s=self._start_s,
            end_s=end_s,
            ok=self.error is None,
            error=self.error,
            attributes={name: _storable(value) for name, value in self.attributes.items()},
            turn_id=self._turn_id,
        )

    def note(self, **attributes: Attribute) -> None:
        """More of its attributes, known by now."""
        self.attributes |= attributes

    @property
    def kind(self) -> SpanKind:
        return self._kind


class SpanRecorder:
    """The spans of one episode. ``created_at``: Unix time of its creation. ``most``: calls and snapshots that are
    recorded. ``keep`` is given each span as it ends, and the number of those that are not, as JSON."""

    def __init__(
        self, created_at: float, most: int, keep: Callable[[Mapping[str, Any]], None] = lambda meta: None
    ) -> None:
        self.zero = time.monotonic() - max(0.0, time.time() - created_at)
        """The creation by the monotonic clock."""
        self._most = most
        self._keep = keep
        self._open: dict[str, OpenSpan] = {}
        self._ended: list[bytes] = []
        """As JSON, a fraction of the objects' size."""
        self._bounded = 0
        self._sealed = False
        self.dropped = 0

    def now(self) -> float:
        """Seconds since the episode's creation, by the monotonic clock."""
        return time.monotonic() - self.zero

    def begin(
        self,
        kind: SpanKind,
        name: str = "",
        *,
        parent: OpenSpan | None = None,
        start_s: float | None = None,
        turn_id: str | None = None,
        **attributes: Attribute,
    ) -> OpenSpan:
        """A span that whoever began it ends. ``start_s``: earlier than now."""
        at = self.now() if start_s is None else start_s
        parent_id = None if parent is None else parent.span_id
        span = OpenSpan(self, kind, name, at, parent_id, turn_id, attributes)
        if not self._sealed:
            self._open[span.span_id] = span
        return span

    @contextmanager
    def span(
        self,
        kind: SpanKind,
        name: str = "",
        *,
        parent: OpenSpan | None = None,
        start_s: float | None = None,
        turn_id: str | None = None,
        stoppable: bool = False,
        **attributes: Attribute,
    ) -> Iterator[OpenSpan]:
        """A span around the block; what the block raises is its error. ``stoppable``: a cancellation is none."""
        span = self.begin(kind, name, parent=parent, start_s=start_s, turn_id=turn_id, **attributes)
        try:
            yield span
        except BaseException as error:
            stopped = stoppable and not isinstance(error, Exception)
            span.end(None if stopped else error_type(error))
            raise
        span.end()

    def spans(self) -> list[Span]:
        """Those that ended, in that order, then those that go on."""
        ended = [Span.model_validate_json(data) for data in self._ended]
        return [*ended, *(span.as_span(None) for span in self._open.values())]

    def intervals(self) -> dict[SpanKind, list[Interval]]:
        """Beginning and end of those that ended."""
        found: dict[SpanKind, list[Interval]] = {}
        for data in self._ended:
            meta = orjson.loads(data)
            found.setdefault(SpanKind(meta["kind"]), []).append((meta["start_s"], meta["end_s"]))
        return found

    def seal(self) -> None:
        """Ends what goes on; nothing is recorded any more."""
        for span in list(self._open.values()):
            span.end(CANCELLED)
        if self.dropped and not self._sealed:
            self._keep({"dropped": self.dropped})
        self._sealed = True

    def _end(self, span: OpenSpan) -> None:
        if self._open.pop(span.span_id, None) is None:
            return
        if span.kind in BOUNDED:
            if self._bounded >= self._most:
                self.dropped += 1
                if self.dropped == 1:  # a server that is killed has said so, at least
                    self._keep({"dropped": 1})
                return
            self._bounded += 1
        meta = span.as_span(self.now()).model_dump(mode="json", exclude_defaults=True)
        self._ended.append(orjson.dumps(meta))
        self._keep(meta)


@contextmanager
def nested(
    parent: OpenSpan | None, kind: SpanKind, name: str = "", **attributes: Attribute
) -> Iterator[OpenSpan | None]:
    """A span within ``parent``, around the block; nothing is recorded where that is None."""
    if parent is None:
        yield None
        return
    with parent.child(kind, name, **attributes) as span:
        yield span


def error_type(error: BaseException) -> str:
    """The error type that a span records for an exception."""
    if isinstance(error, TurnstileError):
        return error.type
    return TurnstileError.type if isinstance(error, Exception) else CANCELLED


def _storable(value: Attribute) -> Attribute:
    """With a form in JSON."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return _text(value) if isinstance(value, str) else value


def _text(text: str) -> str:
    short = text if len(text) <= _MAX_NAME else f"{text[:_MAX_NAME]}…"
    return short if short.isascii() else short.encode(errors="replace").decode()
