"""The spans of model calls that became turns, from the turns' own timings, and the report that joins them with
what was recorded. Pure.

A recorded call that failed has the id of the turn that it would have been: where there is such a turn (its reply
was cut), the turn's span stands, with the error of the other.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from turnstile.models import Episode, PartSeconds, Span, SpanKind, SpanReport, Turn, TurnTimings
from turnstile.models.spans import Interval, seconds_of
from turnstile_server.capture import Node
from turnstile_server.spans import SpanRecorder

_ROUNDING_S = 0.01
"""Turns are placed by the system's clock, all else by the monotonic one."""
INTERRUPTED = "interrupted"
"""Error of a turn that was cut after text had left, where no caller's error says more."""


def report_of(
    episode: Episode,
    nodes: Iterable[Node],
    in_flight: Iterable[tuple[str, float]],
    recorded: Sequence[Span],
    *,
    dropped: int,
    most_regrades: int,
) -> SpanReport:
    """``nodes``: all of the tree. ``in_flight``: turn id and Unix time of the beginning of each call that goes on.
    ``most_regrades``: so many are shown, the latest ones."""
    created_at = episode.timings.created_at
    failed = {span.turn_id: span for span in reversed(recorded) if span.kind is SpanKind.MODEL}
    own = [node for node in nodes if not node.inherited]
    turn_ids = {node.turn_id for node in own}
    spans = [
        span
        for span in _without_old_regrades(recorded, most_regrades)
        if span.kind is not SpanKind.MODEL
        or span.turn_id is None
        or (span.turn_id not in turn_ids and failed[span.turn_id] is span)
    ]
    for node in own:
        spans += _turn_spans(node, created_at, failed.get(node.turn_id))
    for turn_id, began in in_flight:
        if turn_id not in turn_ids and turn_id not in failed:
            start_s = _since(began, created_at)
            spans.append(Span(span_id=turn_id, kind=SpanKind.MODEL, start_s=start_s, turn_id=turn_id))
    spans.sort(key=lambda span: span.start_s)
    return SpanReport(
        episode_id=episode.episode_id,
        started_at=created_at,
        spans=tuple(_under_agents(spans)),
        dropped=dropped,
    )


def seconds_spent(episode: Episode, nodes: Iterable[Node], recorded: SpanRecorder) -> PartSeconds:
    """Seconds of an episode by part, as ``seconds_by_part`` would say of its report."""
    found = recorded.intervals()
    found.setdefault(SpanKind.MODEL, []).extend(
        _call_times(node, episode.timings.created_at) for node in nodes if not node.inherited
    )
    return seconds_of(found)


def _call_times(node: Node, created_at: float) -> Interval:
    """From the call's arrival to its durable turn."""
    times = node.turn.timings
    start_s = _since(times.started_at, created_at)
    return start_s, start_s + times.total_s + (node.commit_s or 0.0)


def _turn_spans(node: Node, created_at: float, failure: Span | None) -> Iterator[Span]:
    """The span of the model call, then its parts."""
    turn = node.turn
    cut = turn.finish_reason == "abort"
    if failure is not None and (cut or node.delivery != "written"):
        error = failure.error
    else:
        error = INTERRUPTED if cut else None
    start_s, end_s = _call_times(node, created_at)
    yield Span(
        span_id=turn.turn_id,
        kind=SpanKind.MODEL,
        name=turn.dialect,
        start_s=start_s,
        end_s=end_s,
        ok=error is None,
        error=error,
        attributes=_attributes(turn, node.prompt_count),
        turn_id=turn.turn_id,
    )
    for kind, name, begin, end in _parts(turn.timings, node.commit_s):
        if end > begin:
            yield Span(
                span_id=f"{turn.turn_id}.{name}",
                parent_id=turn.turn_id,
                kind=kind,
                name=name,
                start_s=start_s + begin,
                end_s=start_s + end,
                turn_id=turn.turn_id,
            )


def _attributes(turn: Turn, prompt_tokens: int) -> dict[str, str | bool | int | float]:
    said: dict[str, str | bool | int | float] = {
        "seq": turn.seq,
        "prompt_tokens": prompt_tokens if turn.upstream is None else turn.upstream.prompt_tokens or 0,
        "completion_tokens": turn.generated_tokens,
        "finish_reason": turn.finish_reason,
    }
    if turn.thread is not None:
        named = {"thread": turn.thread.name, "thread_parent": turn.thread.parent}
        said |= {key: name for key, name in named.items() if name is not None}
    if turn.break_ is not None:
        said["break"] = turn.break_.reason.value
    return said


def _parts(times: TurnTimings, commit_s: float | None) -> Iterator[tuple[SpanKind, str, float, float]]:
    """Kind, name, beginning and end of each, in seconds since the call came."""
    rested, prompt = min(times.rest_s, times.render_s), times.render_s
    sampled = prompt + times.engine_s
    placed = min(prompt + times.queue_s, sampled)
    yield SpanKind.WAIT, "snapshot", 0.0, rested
    yield SpanKind.RENDER, "render", rested, prompt
    yield SpanKind.WAIT, "place", prompt, placed
    first = placed
    if times.first_token_s is not None and times.pieces != 1:
        first = min(max(times.first_token_s, placed), sampled)
        yield SpanKind.WAIT, "first_token", placed, first
    yield SpanKind.DECODE, "decode", first, sampled
    if commit_s is not None:
        yield SpanKind.COMMIT, "commit", times.total_s, times.total_s + commit_s


def _since(at: float, created_at: float) -> float:
    return max(0.0, at - created_at)


def _under_agents(spans: Iterable[Span]) -> Iterator[Span]:
    """Calls below the agent that ran when they began. ``spans`` are in order of their start."""
    agents = []
    for span in spans:
        if span.kind is SpanKind.AGENT:
            agents.append(span)
        calls = span.parent_id is None and span.kind in (SpanKind.MODEL, SpanKind.TOOL)
        over = [one for one in agents if calls and (one.end_s is None or span.start_s < one.end_s + _ROUNDING_S)]
        yield span.model_copy(update={"parent_id": over[-1].span_id}) if over else span


def _without_old_regrades(recorded: Sequence[Span], most: int) -> list[Span]:
    """Children come before their parents, as they ended first."""
    roots = [span.span_id for span in recorded if "regrade_id" in span.attributes]
    gone = set(roots[: max(0, len(roots) - most)])
    if not gone:
        return list(recorded)
    kept = []
    for span in reversed(recorded):
        if span.span_id in gone or span.parent_id in gone:
            gone.add(span.span_id)
        else:
            kept.append(span)
    return kept[::-1]
