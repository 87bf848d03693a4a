"""The time of an episode: spans from its creation to its end, and their sums."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import StrEnum

from pydantic import Field

from turnstile.models.base import Model


class SpanKind(StrEnum):
    """The kind of a span: what happened in it. ``docs/spans.md`` says more of each."""

    QUEUE = "queue"
    """It waited for one of ``episodes.max_running`` places."""
    SETUP = "setup"
    """It was prepared; of a task with steps, each step once more."""
    WORLD = "world"
    """The task's world was reset, or graded the work."""
    SANDBOX = "sandbox"
    """A sandbox: what it needs was installed or fetched, it was made, checked, removed."""
    FILES = "files"
    """The task's files and set-up commands; the work as it was collected, kept and compared."""
    OWN_TOOLS = "own_tools"
    """The episode's own tools were opened."""
    AGENT = "agent"
    """An agent, from its start to its exit; an external one, as long as it might work."""
    MODEL = "model"
    """A model call. ``turn_id``: the turn that it became; None or an unknown one where it became none."""
    RENDER = "render"
    WAIT = "wait"
    """A model call waited for a snapshot, a place on a worker, or its first token."""
    DECODE = "decode"
    COMMIT = "commit"
    """Its turn was made durable."""
    TOOL = "tool"
    """A call of a tool, over MCP or OpenEnv. ``turn_id``: the turn that was recorded last before it."""
    DRAIN = "drain"
    """The episode ends, and calls in flight are given time for it."""
    SNAPSHOT = "snapshot"
    GRADING = "grading"
    """The work was judged; with the attribute ``regrade_id``, once more later."""
    GRADING_QUEUE = "grading_queue"
    """The work waited for one of ``grading.parallel`` places."""
    GRADER = "grader"
    """One try of one grader, or one attempt in a sandbox of its own."""


class Span(Model):
    """A piece of an episode's time. Times are seconds since the episode's ``created_at``."""

    span_id: str
    parent_id: str | None = None
    kind: SpanKind
    name: str = ""
    start_s: float
    end_s: float | None = None
    """None: it goes on."""
    ok: bool = True
    error: str | None = None
    """Type of what went wrong (``docs/errors.md``); ``cancelled`` where it was stopped from outside."""
    attributes: dict[str, str | bool | int | float] = Field(default_factory=dict)
    """Sizes, counts and names. Never contents."""
    turn_id: str | None = None


class SpanReport(Model):
    """Answer to ``GET /episodes/{id}/spans``: the spans by their start."""

    episode_id: str
    started_at: float
    """Unix time of the episode's creation: 0 of all times."""
    spans: tuple[Span, ...] = ()
    dropped: int = 0
    """Calls and snapshots that were not recorded (a record keeps 5,000)."""


class PartSeconds(Model):
    """Seconds of an episode by what they were spent on. No second counts twice, so they add up to no more than the
    episode's length."""

    queue: float = 0.0
    setup: float = 0.0
    agent: float = 0.0
    """An agent ran, and neither a model call nor a tool call of it."""
    model: float = 0.0
    """At least one model call, and no tool call."""
    tools: float = 0.0
    """At least one tool call."""
    grading_queue: float = 0.0
    """The work waited to be judged."""
    grading: float = 0.0
    """It was judged."""


Interval = tuple[float, float]
"""Beginning and end, in seconds since the episode's creation."""


def seconds_by_part(spans: Iterable[Span], now_s: float | None = None) -> PartSeconds:
    """The time of an episode by part. Parallel calls count once; a model call that lasts while a tool runs counts
    as ``tools``.

    ``now_s``: seconds since the creation at which open spans are cut; None: they are left out. Gradings after the
    episode's end (``regrade_id``) do not count.
    """
    found: dict[SpanKind, list[Interval]] = {}
    for span in spans:
        end_s = now_s if span.end_s is None else span.end_s
        if end_s is not None and end_s > span.start_s and "regrade_id" not in span.attributes:
            found.setdefault(span.kind, []).append((span.start_s, end_s))
    return seconds_of(found)


def seconds_of(found: Mapping[SpanKind, Iterable[Interval]]) -> PartSeconds:
    """As ``seconds_by_part``, of the spans' times by kind; they may overlap and have any order."""
    of = {kind: _merged(intervals) for kind, intervals in found.items()}
    grading, waited = of.get(SpanKind.GRADING, []), of.get(SpanKind.GRADING_QUEUE, [])
    waited = _without(waited, _without(waited, grading))  # that of a regrade comes after the episode
    tools = _without(of.get(SpanKind.TOOL, []), grading)
    model = _without(of.get(SpanKind.MODEL, []), _merged([*tools, *grading]))
    setup = _without(of.get(SpanKind.SETUP, []), _merged([*grading, *tools, *model]))
    agent = _without(of.get(SpanKind.AGENT, []), _merged([*grading, *tools, *model, *setup]))
    return PartSeconds(
        queue=_length(of.get(SpanKind.QUEUE, [])),
        setup=_length(setup),
        agent=_length(agent),
        model=_length(model),
        tools=_length(tools),
        grading_queue=_length(waited),
        grading=_length(_without(grading, waited)),
    )


def _merged(intervals: Iterable[Interval]) -> list[Interval]:
    """Disjoint intervals that cover the same, in order."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def _without(intervals: list[Interval], taken: list[Interval]) -> list[Interval]:
    """``intervals`` without what ``taken`` covers; both disjoint and in order."""
    left: list[Interval] = []
    first = 0
    for start, end in intervals:
        while first < len(taken) and taken[first][1] <= start:
            first += 1
        at, covered = first, start
        while at < len(taken) and taken[at][0] < end:
            if taken[at][0] > covered:
                left.append((covered, taken[at][0]))
            covered = max(covered, taken[at][1])
            at += 1
        if covered < end:
            left.append((covered, end))
    return left


def _length(intervals: Iterable[Interval]) -> float:
    return sum(end - start for start, end in intervals)
