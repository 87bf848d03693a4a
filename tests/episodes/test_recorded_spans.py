"""The recorder of an episode's spans, their sums, and the spans that are made of turns. Without a server."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import anyio
import pytest

from turnstile.models import (
    Episode,
    EpisodeStatus,
    EpisodeTimings,
    Limits,
    Message,
    Sampling,
    SamplingUsed,
    Span,
    SpanKind,
    SpanReport,
    TaskRef,
    Turn,
    TurnTimings,
    WeightSpan,
    seconds_by_part,
)
from turnstile_server.capture import Node, TokenTree
from turnstile_server.episodes.turn_spans import report_of
from turnstile_server.errors import SandboxUnavailable
from turnstile_server.journal.protocol import RecordType
from turnstile_server.journal.records import span_record
from turnstile_server.journal.segments import decode, encode
from turnstile_server.spans import SpanRecorder

T = SpanKind


def recorder(most: int = 100) -> tuple[SpanRecorder, list[Mapping[str, Any]]]:
    kept: list[Mapping[str, Any]] = []
    return SpanRecorder(0.0, most, kept.append), kept


def test_a_span_is_kept_when_it_ends_and_shown_before() -> None:
    spans, kept = recorder()
    with spans.span(T.SETUP) as setup:
        with setup.child(T.SANDBOX, "create", backend="local"):
            assert [(one.kind, one.end_s) for one in spans.spans()] == [(T.SETUP, None), (T.SANDBOX, None)]
        assert len(kept) == 1
    inner, outer = [Span.model_validate(meta) for meta in kept]
    assert [inner, outer] == spans.spans()
    assert (inner.name, inner.parent_id, inner.attributes) == ("create", outer.span_id, {"backend": "local"})
    assert outer.parent_id is None
    assert outer.start_s <= inner.start_s <= (inner.end_s or 0) <= (outer.end_s or 0)


def test_what_a_block_raises_is_the_error_of_its_span() -> None:
    spans, _ = recorder()
    for error in (SandboxUnavailable("no room"), ValueError("a bug")):
        with pytest.raises(type(error)), spans.span(T.SETUP):
            raise error
    with spans.span(T.TOOL, "bash") as tool:
        tool.error = "tool_error"
    assert [(one.ok, one.error) for one in spans.spans()] == [
        (False, "sandbox_unavailable"),
        (False, "internal_error"),
        (False, "tool_error"),
    ]


@pytest.mark.anyio
async def test_a_cancellation_is_an_error_unless_it_is_the_usual_end() -> None:
    spans, _ = recorder()
    for stoppable in (False, True):
        with anyio.CancelScope() as scope, spans.span(T.AGENT, stoppable=stoppable):
            scope.cancel()
            await anyio.sleep_forever()
    assert [one.error for one in spans.spans()] == ["cancelled", None]


def test_beyond_the_bound_calls_are_counted_and_all_else_is_recorded() -> None:
    spans, kept = recorder(most=3)
    for _ in range(5):
        with spans.span(T.TOOL, "bash"):
            pass
    with spans.span(T.GRADING):
        pass
    assert [one.kind for one in spans.spans()] == [T.TOOL] * 3 + [T.GRADING]
    assert spans.dropped == 2
    spans.seal()
    assert [meta["dropped"] for meta in kept if "dropped" in meta] == [1, 2]


def test_after_the_end_nothing_is_recorded() -> None:
    spans, kept = recorder()
    late = spans.begin(T.TOOL, "bash")
    spans.seal()
    late.end()
    with spans.span(T.TOOL, "bash"):
        pass
    spans.seal()
    (only,) = spans.spans()
    assert (only.error, len(kept)) == ("cancelled", 1)


def test_whatever_a_tool_is_called_and_gives_is_recorded() -> None:
    spans, kept = recorder()
    for name in ("x" * 100_000, "lone \ud800 surrogate", "nul \0, \u202e bidi"):
        with spans.span(T.TOOL, name) as span:
            span.note(value=float("nan"), more=float("-inf"), said="\udfff", whole=1, true=True)
    assert [one.name for one in spans.spans()] == [f"{'x' * 200}…", "lone ? surrogate", "nul \0, \u202e bidi"]
    assert spans.spans()[0].attributes == {
        "value": "nan",
        "more": "-inf",
        "said": "?",
        "whole": 1,
        "true": True,
    }
    stored = [decode(RecordType.SPAN, b"".join(encode(span_record("e", meta)).parts)) for meta in kept]
    assert [Span.model_validate(record.meta) for record in stored] == spans.spans()


# Sums


def at(kind: SpanKind, start: float, end: float | None, **attributes: Any) -> Span:
    return Span(span_id=f"{kind}{start}", kind=kind, start_s=start, end_s=end, attributes=attributes)


def test_every_second_counts_once() -> None:
    spans = [
        at(T.QUEUE, 0, 2),
        at(T.SETUP, 2, 5),
        at(T.SANDBOX, 2, 4),
        at(T.AGENT, 5, 25),
        at(T.MODEL, 6, 10),
        at(T.MODEL, 8, 12),  # a sub-agent's, beside the other
        at(T.TOOL, 11, 15),
        at(T.TOOL, 12, 14),
        at(T.DRAIN, 25, 26),
        at(T.GRADING, 26, 30),
        at(T.GRADER, 27, 29),
        at(T.GRADING_QUEUE, 27, 28),
        at(T.GRADING, 100, 200, regrade_id="r1"),
    ]
    found = seconds_by_part(spans)
    assert found.model_dump() == {
        "queue": 2,
        "setup": 3,
        "agent": 11,
        "model": 5,
        "tools": 4,
        "grading_queue": 1,
        "grading": 3,
    }


def test_what_goes_on_counts_up_to_now() -> None:
    spans = [at(T.QUEUE, 0, 1), at(T.SETUP, 1, 2), at(T.AGENT, 2, None), at(T.MODEL, 5, None)]
    assert seconds_by_part(spans).agent == 0
    assert seconds_by_part(spans, now_s=9.0).model_dump() == {
        "queue": 1,
        "setup": 1,
        "agent": 3,
        "model": 4,
        "tools": 0,
        "grading_queue": 0,
        "grading": 0,
    }


def test_of_a_task_with_steps_what_is_between_them_is_no_agents_time() -> None:
    spans = [
        at(T.AGENT, 0, 4),
        at(T.GRADING, 3, 6),
        at(T.SETUP, 6, 7),
        at(T.AGENT, 7, 9),
        at(T.MODEL, 7, 7.5),
        at(T.MODEL, 8.5, 9),
    ]
    found = seconds_by_part(spans)
    assert (found.agent, found.model, found.grading, found.setup) == (4, 1, 3, 1)


# Turns

NOW = 1_000_000.0
EPISODE = Episode(
    episode_id="ep_1",
    status=EpisodeStatus.COMPLETED,
    agent="external",
    task=TaskRef(instruction="t"),
    rollout_id="ep_1",
    sampling=Sampling(),
    limits=Limits(),
    timings=EpisodeTimings(created_at=NOW),
)


def node(turn_id: str, *, inherited: bool = False, finish: str = "stop", **timings: Any) -> Node:
    turn = Turn(
        turn_id=turn_id,
        episode_id="ep_1",
        parent_id=None,
        seq=0,
        dialect="chat",
        context_ids=[1, 2, 3],
        completion_ids=[4, 5],
        logprobs=[-0.5, -0.5],
        weight_spans=(WeightSpan(start=0, end=2, version="v"),),
        finish_reason=finish,
        sampling=SamplingUsed(max_new_tokens=9),
        template_hash="t",
        tools_key="k",
        request_key="r",
        new_messages=(Message(role="user", content="hi"),),
        reply=Message(role="assistant", content="ho"),
        timings=TurnTimings(**{"started_at": NOW + 10, **timings}),
    )
    return TokenTree().add(turn, inherited=inherited)


def report(nodes: Sequence[Node] = (), recorded: Sequence[Span] = (), **more: Any) -> SpanReport:
    wanted: dict[str, Any] = {"in_flight": (), "dropped": 0, "most_regrades": 2, **more}
    return report_of(EPISODE, nodes, wanted.pop("in_flight"), recorded, **wanted)


def shown(found: SpanReport) -> list[tuple[str, float, float | None]]:
    return [(one.name, one.start_s, one.end_s) for one in found.spans]


def test_a_turn_is_a_model_call_and_its_parts() -> None:
    times = {
        "rest_s": 1,
        "render_s": 3,
        "queue_s": 2,
        "first_token_s": 6,
        "engine_s": 7,
        "total_s": 11,
        "pieces": 4,
    }
    one = node("turn_1", **times)
    one.commit_s = 0.5
    found = report([one])
    assert shown(found) == [
        ("chat", 10, 21.5),
        ("snapshot", 10, 11),
        ("render", 11, 13),
        ("place", 13, 15),
        ("first_token", 15, 16),
        ("decode", 16, 20),
        ("commit", 21, 21.5),
    ]
    call, *parts = found.spans
    assert (call.span_id, call.turn_id, call.kind) == ("turn_1", "turn_1", T.MODEL)
    assert call.attributes["prompt_tokens"] == 3
    assert {one.parent_id for one in parts} == {"turn_1"}
    assert [one.kind for one in parts] == [T.WAIT, T.RENDER, T.WAIT, T.WAIT, T.DECODE, T.COMMIT]


def test_tokens_that_came_at_once_have_no_first_one() -> None:
    found = report([node("turn_1", render_s=1, first_token_s=5, engine_s=4, total_s=5, pieces=1)])
    assert shown(found)[1:] == [("render", 10, 11), ("decode", 11, 15)]


def test_a_turn_of_an_older_version_has_the_parts_that_it_knows() -> None:
    found = report([node("turn_1", render_s=1, first_token_s=2, engine_s=4, total_s=5)])
    assert shown(found)[1:] == [("render", 10, 11), ("first_token", 11, 12), ("decode", 12, 15)]


def test_turns_that_a_fork_began_with_are_the_other_episodes() -> None:
    assert report([node("turn_1", inherited=True)]).spans == ()


def failure(turn_id: str | None, error: str = "caller_gone") -> Span:
    return at(T.MODEL, 10.5, 11).model_copy(
        update={"turn_id": turn_id, "ok": False, "error": error, "span_id": f"{turn_id} {error}"}
    )


def test_a_call_that_was_cut_is_shown_once_as_its_turn() -> None:
    found = report([node("turn_1", finish="abort")], [failure("turn_1"), failure("turn_1", "episode_ended")])
    assert [(one.span_id, one.error) for one in found.spans] == [("turn_1", "caller_gone")]
    (alone,) = report([node("turn_1", finish="abort")]).spans
    assert (alone.ok, alone.error) == (False, "interrupted")
    whole = node("turn_1")
    (lost,) = report([whole], [failure("turn_1")]).spans
    assert lost.error == "caller_gone"
    whole.record_delivery("written")
    (got,) = report([whole], [failure("turn_1")]).spans
    assert got.ok, "another caller had it"


def test_calls_that_became_no_turn_are_shown_as_they_were_recorded() -> None:
    refused, also, lost = failure(None), failure(None, "budget_exhausted"), failure("turn_9")
    found = report([], [refused, also, lost, failure("turn_9", "again")], in_flight=[("turn_9", NOW)])
    assert list(found.spans) == [refused, also, lost]


def test_calls_in_flight_go_on() -> None:
    found = report([node("turn_1")], in_flight=[("turn_1", NOW + 10), ("turn_2", NOW + 20)])
    assert [(one.span_id, one.end_s is None) for one in found.spans] == [("turn_1", False), ("turn_2", True)]


def test_calls_are_below_the_agent_that_ran() -> None:
    first, second = at(T.AGENT, 1, 9), at(T.AGENT, 9.5, None)
    tool, early = at(T.TOOL, 5, 6), at(T.TOOL, 0.5, 0.6)
    found = {one.span_id: one.parent_id for one in report([node("turn_1")], [early, tool, first, second]).spans}
    assert (found[tool.span_id], found["turn_1"], found[early.span_id]) == (first.span_id, second.span_id, None)


def test_of_many_regrades_the_latest_are_shown() -> None:
    recorded = []
    for number in range(4):
        root = at(T.GRADING, number, number + 1, regrade_id=f"r{number}")
        recorded += [at(T.GRADER, number + 0.5, number + 1).model_copy(update={"parent_id": root.span_id}), root]
    found = report([], recorded).spans
    assert [one.start_s for one in found] == [2, 2.5, 3, 3.5]
