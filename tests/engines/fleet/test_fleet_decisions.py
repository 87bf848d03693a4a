"""What a fleet decides, without engines: placement, order of the queue, limits, joined completions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from turnstile.models import ExpertArray, WeightSpan
from turnstile_server.engines.fleet.completion import JoinedCompletion
from turnstile_server.engines.fleet.limit import COOL_OBSERVATIONS, WorkerLimit
from turnstile_server.engines.fleet.placement import Placement, preference
from turnstile_server.engines.fleet.queue import CallQueue, Ticket
from turnstile_server.engines.protocol import CallOrigin, EngineChunk, EngineFinish, EngineLoad, EngineSampling
from turnstile_server.engines.versions import WeightVersions
from turnstile_server.errors import Conflict, EngineUnavailable

EPISODES = [f"ep_{number}" for number in range(600)]
PROMPT = np.arange(5, dtype=np.int32)


# Placement


def test_a_worker_that_leaves_moves_its_own_episodes_only() -> None:
    before = {episode: preference(episode, ["a", "b", "c"])[0] for episode in EPISODES}
    after = {episode: preference(episode, ["a", "c"])[0] for episode in EPISODES}
    assert all(after[episode] == before[episode] for episode in EPISODES if before[episode] != "b")
    assert min(Counter(before.values()).values()) > 150, "episodes are spread evenly"


def test_a_worker_that_joins_takes_only_what_prefers_it() -> None:
    before = {episode: preference(episode, ["a", "b"])[0] for episode in EPISODES}
    after = {episode: preference(episode, ["a", "b", "c"])[0] for episode in EPISODES}
    moved = [episode for episode in EPISODES if after[episode] != before[episode]]
    assert {after[episode] for episode in moved} == {"c"}
    assert 150 < len(moved) < 250


def test_an_episode_stays_where_its_cache_is_when_another_worker_joins() -> None:
    placement = Placement(load_factor=1.25, remembered=1000)
    for episode in EPISODES:
        placement.put(episode, placement.worker_of(CallOrigin(episode), {"a": 0, "b": 0}) or "")
    moved = [
        episode
        for episode in EPISODES
        if placement.worker_of(CallOrigin(episode), {"a": 0, "b": 0, "c": 0}) != preference(episode, ["a", "b"])[0]
    ]
    assert moved == []


def test_new_episodes_pass_over_a_worker_that_is_far_busier() -> None:
    placement = Placement(load_factor=1.25, remembered=1000)
    placed = Counter(placement.worker_of(CallOrigin(episode), {"a": 40, "b": 4}) for episode in EPISODES)
    assert placed == {"b": len(EPISODES)}


class _ByGroup(Placement):
    def order(self, origin: CallOrigin, calls: Mapping[str, int]) -> list[str]:
        return preference(origin.group or "", calls)


def test_another_order_of_preference_is_bounded_by_load_and_moves_no_placed_episode() -> None:
    placement = _ByGroup(load_factor=1.25, remembered=1000)
    own, other = preference("g", ["a", "b"])
    assert placement.worker_of(CallOrigin("first", "g"), {own: 4, other: 4}) == own
    placement.put("first", own)
    assert placement.worker_of(CallOrigin("second", "g"), {own: 40, other: 4}) == other
    assert placement.worker_of(CallOrigin("first", "g"), {own: 40, other: 4}) == own
    assert placement.worker_of(CallOrigin("first", "g"), {other: 4}) == other


def test_only_as_many_episodes_are_remembered_as_the_setting_says() -> None:
    placement = Placement(load_factor=1.25, remembered=2)
    placement.put("old", "b")
    placement.put("x", "a")
    placement.put("y", "a")
    own = preference("old", ["a", "b"])[0]
    assert placement.worker_of(CallOrigin("old"), {"a": 0, "b": 0}) == own


# The queue


def _ticket(
    episode: str, since: float, *, group: str | None = None, age: float = 0.0, priority: int = 0
) -> Ticket:
    return Ticket(CallOrigin(episode, group, priority, age), since, lambda: None)


def test_evaluation_goes_before_training_and_older_groups_before_newer() -> None:
    queue = CallQueue(starving_s=60)
    young = _ticket("a", 1.0, group="g2", age=20.0)
    old = _ticket("b", 2.0, group="g1", age=10.0)
    evaluation = _ticket("c", 3.0, group="e", age=30.0, priority=10)
    for ticket in (young, old, evaluation):
        queue.add(ticket)
    assert queue.in_order(5.0) == [evaluation, old, young]


def test_a_group_with_many_calls_does_not_starve_one_with_few() -> None:
    queue = CallQueue(starving_s=60)
    many = [_ticket(f"m{number}", 1.0 + number, group="many", age=1.0) for number in range(4)]
    for ticket in many:
        queue.add(ticket)
    queue.admit(many[0], "w1")
    few = _ticket("f", 9.0, group="few", age=9.0)
    queue.add(few)
    assert queue.in_order(10.0)[0] is few
    queue.ended(many[0])
    assert queue.in_order(10.0)[0] is many[1], "with nothing running the older group is first again"


def test_a_call_that_has_waited_too_long_goes_before_a_higher_priority() -> None:
    queue = CallQueue(starving_s=60)
    patient, urgent = _ticket("p", 0.0), _ticket("u", 59.0, priority=100)
    queue.add(patient)
    queue.add(urgent)
    assert queue.in_order(59.9)[0] is urgent
    assert queue.in_order(60.0)[0] is patient


# The limit


def _limit(**options: int) -> WorkerLimit:
    return WorkerLimit(**{"start": 4, "floor": 1, "ceiling": 512, **options})


def test_the_limit_doubles_while_it_is_all_used_and_nothing_waits() -> None:
    limit = _limit()
    for expected in (8, 16, 32):
        limit.observe(EngineLoad(limit.value, 0, 0.1, 0), limit.value)
        assert limit.value == expected
    limit.observe(EngineLoad(3, 0, 0.1, 0), 3)
    assert limit.value == 32, "a limit that is not used up does not grow"


def test_a_retraction_cuts_the_limit_once_and_growth_is_slow_from_then_on() -> None:
    limit = _limit(start=100)
    limit.observe(EngineLoad(80, 0, 0.9, 0), 80)
    limit.observe(EngineLoad(80, 0, 0.9, 2), 80)
    assert limit.value == 60
    for retracted in range(3, 3 + COOL_OBSERVATIONS):
        limit.observe(EngineLoad(60, 0, 0.9, retracted), 60)
        assert limit.value == 60, "what a cut does is not seen at once"
    limit.observe(EngineLoad(60, 0, 0.7, 2 + COOL_OBSERVATIONS), 60)
    assert limit.value == 61


def test_calls_that_wait_in_the_engine_are_taken_out_of_the_limit() -> None:
    limit = _limit(start=64)
    for running in (20, 0, 3):
        assert limit.value == 64, "one observation may fall into the start of a batch"
        limit.observe(EngineLoad(running, 64 - running, 0.5, 0), 64)
    assert limit.value == 22, "what it runs at once, and a few"


@given(st.lists(st.tuples(st.integers(0, 600), st.integers(0, 600), st.floats(0, 1), st.integers(0, 9))))
def test_the_limit_stays_within_its_bounds(loads: list[tuple[int, int, float, int]]) -> None:
    limit = _limit(start=4, floor=2, ceiling=40)
    for running, waiting, kv, retracted in loads:
        limit.observe(EngineLoad(running, waiting, kv, retracted), running + waiting)
        assert 2 <= limit.value <= 40


def test_a_fixed_limit_does_not_move() -> None:
    limit = WorkerLimit(start=4, floor=1, ceiling=32, adaptive=False)
    limit.observe(EngineLoad(20, 44, 1.0, 9), 32)
    limit.refused()
    assert limit.value == 32


# Joined completions


def _chunk(
    ids: Sequence[int], finish: str | None = None, spans: Sequence[tuple[int, int, str]] = ()
) -> EngineChunk:
    ended = None
    if finish is not None:
        named = tuple(WeightSpan(start=start, end=end, version=version) for start, end, version in spans)
        ended = EngineFinish(finish, None, named, cached_tokens=3)  # type: ignore[arg-type]
    numbers = np.array(ids, np.int32)
    return EngineChunk(numbers, -numbers.astype(np.float32) / 100, ended, "v")


def _decode(ids: Sequence[int]) -> str:
    return "".join(chr(97 + token % 26) for token in ids)


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 6), st.sampled_from(["v1", "v2", "v3"])), min_size=1, max_size=8),
    st.integers(1, 40),
)
def test_cut_parts_join_to_what_one_uncut_generation_would_be(parts: list[tuple[int, str]], budget: int) -> None:
    """The law: ids in order, one logprob each, spans that tile, prompts that repeat all of it, a budget never
    passed."""
    joined = JoinedCompletion(PROMPT, EngineSampling(max_new_tokens=budget), _decode)
    sampled: list[int] = []
    versions: list[str] = []
    given_ids: list[int] = []
    finish = None
    for number, (wanted, version) in enumerate(parts):
        joined.begin()
        assert joined.input_ids.tolist() == [*PROMPT.tolist(), *sampled]
        assert joined.sampling.max_new_tokens == budget - len(sampled)
        count = min(wanted, budget - len(sampled))
        ids = list(range(len(sampled) + 100, len(sampled) + 100 + count))
        last = number == len(parts) - 1 or len(sampled) + count == budget
        chunk = joined.take(_chunk(ids, "length" if last else "abort", [(0, count, version)] if count else []))
        sampled += ids
        versions += [version] * count
        if chunk is not None:
            given_ids += chunk.ids.tolist()
            finish = chunk.finish
        if last:
            break
        joined.cut(seen=True)
    assert finish is not None
    assert given_ids == sampled
    assert [span.version for span in finish.weight_spans for _ in range(span.start, span.end)] == versions
    assert all(
        left.version != right.version
        for left, right in zip(finish.weight_spans, finish.weight_spans[1:], strict=False)
    )
    assert joined.hand_out(finish).ids.tolist() == sampled
    assert joined.given_up == 0
    assert finish.cached_tokens == 3


def test_a_stop_string_across_a_cut_is_found_and_ends_the_completion_at_its_last_token() -> None:
    sampling = EngineSampling(max_new_tokens=50, stop=("cde",))
    joined = JoinedCompletion(PROMPT, sampling, _decode)
    joined.begin()
    joined.take(_chunk([0, 1, 2, 3], "abort", [(0, 4, "v1")]))  # "abcd"
    joined.cut(seen=True)
    assert joined.watches_boundary
    joined.begin()
    chunk = joined.take(_chunk([4, 9, 9]))  # "e" ends it; "jj" is surplus
    assert chunk is not None
    assert chunk.finish is not None
    assert (chunk.ids.tolist(), chunk.finish.reason, chunk.finish.matched) == ([4], "stop", "cde")
    assert joined.given_up == 2
    assert chunk.finish.weight_spans[-1].end == 5


def test_no_stop_string_is_seen_where_the_texts_do_not_join() -> None:
    joined = JoinedCompletion(PROMPT, EngineSampling(max_new_tokens=50, stop=("cde",)), _decode)
    joined.begin()
    joined.take(_chunk([0, 1, 2], "abort", [(0, 3, "v1")]))  # "abc"
    joined.cut(seen=True)
    joined.begin()
    chunk = joined.take(_chunk([4, 3, 9, 9]))  # "edjj"
    assert chunk is not None
    assert chunk.finish is None
    assert not joined.watches_boundary


def test_an_answer_with_a_format_starts_again_if_none_of_it_was_seen() -> None:
    joined = JoinedCompletion(PROMPT, EngineSampling(max_new_tokens=50, json_schema="{}"), _decode)
    joined.begin()
    joined.take(_chunk([1, 2, 3], "abort", [(0, 3, "v1")]))
    joined.cut(seen=False)
    assert joined.input_ids.tolist() == PROMPT.tolist()
    assert joined.sampling.max_new_tokens == 50
    joined.begin()
    chunk = joined.take(_chunk([7], "stop", [(0, 1, "v2")]))
    assert chunk is not None
    assert chunk.finish is not None
    assert joined.hand_out(chunk.finish).given_up == 3


def test_an_answer_with_a_format_that_was_seen_cannot_be_continued() -> None:
    joined = JoinedCompletion(PROMPT, EngineSampling(max_new_tokens=50, json_schema="{}"), _decode)
    joined.begin()
    joined.take(_chunk([1, 2, 3], "abort", [(0, 3, "v1")]))
    with pytest.raises(EngineUnavailable, match="response_format"):
        joined.cut(seen=True)


@pytest.mark.parametrize("grammar", [{"json_schema": "{}"}, {"structural_tag": "{}"}])
@pytest.mark.parametrize("seen", [True, False])
def test_an_engine_that_follows_a_grammar_through_tokens_continues_an_answer_with_a_format(
    grammar: dict[str, str], seen: bool
) -> None:
    joined = JoinedCompletion(PROMPT, EngineSampling(max_new_tokens=50, **grammar), _decode)
    joined.begin(resumes_grammars=True)
    joined.take(_chunk([1, 2, 3], "abort", [(0, 3, "v1")]))
    joined.cut(seen=seen)
    assert joined.input_ids.tolist() == [*PROMPT.tolist(), 1, 2, 3]
    assert (joined.sampling.max_new_tokens, joined.sampling.grammar_from) == (47, len(PROMPT))
    joined.begin(resumes_grammars=False)
    joined.cut(seen=False)
    assert joined.sampling.grammar_from is None, "another engine begins it anew"


def test_a_part_that_failed_leaves_no_trace_but_its_count() -> None:
    joined = JoinedCompletion(PROMPT, EngineSampling(max_new_tokens=9), None)
    joined.begin()
    joined.take(_chunk([1, 2], "abort", [(0, 2, "v1")]))
    joined.cut(seen=False)
    joined.begin()
    joined.take(_chunk([3]))
    joined.give_up_part()
    assert (joined.count, joined.given_up) == (2, 1)
    assert joined.input_ids.tolist() == [*PROMPT.tolist(), 1, 2]


def test_stale_spans_stay_apart_from_fresh_ones_of_the_same_weights() -> None:
    joined = JoinedCompletion(PROMPT, EngineSampling(max_new_tokens=9), None)
    joined.begin()
    chunk = _chunk([1, 2], "abort", [(0, 2, "v1")])
    assert chunk.finish is not None
    stale = tuple(span.model_copy(update={"stale_kv": True}) for span in chunk.finish.weight_spans)
    joined.take(replace(chunk, finish=replace(chunk.finish, weight_spans=stale)))
    joined.cut(seen=True)
    joined.begin()
    last = joined.take(_chunk([3], "stop", [(0, 1, "v1")]))
    assert last is not None
    assert last.finish is not None
    assert [(span.end, span.stale_kv) for span in last.finish.weight_spans] == [(2, True), (3, False)]


@pytest.mark.parametrize("collected", [True, False])
def test_the_experts_of_the_parts_join_without_a_gap(collected: bool) -> None:
    """Rows of positions [2, prompt + completion - 1); none at all where one part has none."""
    joined = JoinedCompletion(PROMPT, EngineSampling(max_new_tokens=9, experts_from=2), None)

    def rows(first: int, end: int) -> ExpertArray:
        return np.arange(first, end, dtype=np.uint8)[:, None, None]

    joined.begin()
    assert joined.sampling.experts_from == 2
    chunk = _chunk([1, 2, 3], "abort", [(0, 3, "v1")])
    assert chunk.finish is not None
    first = replace(chunk.finish, routed_experts=rows(2, 7) if collected else None)
    joined.take(replace(chunk, finish=first))
    joined.cut(seen=True)
    joined.begin()
    assert joined.sampling.experts_from == (7 if collected else None)
    chunk = _chunk([4, 5], "stop", [(0, 2, "v1")])
    assert chunk.finish is not None
    last = joined.take(replace(chunk, finish=replace(chunk.finish, routed_experts=rows(7, 9))))
    assert last is not None
    assert last.finish is not None
    experts = last.finish.routed_experts
    assert (None if experts is None else experts[:, 0, 0].tolist()) == (list(range(2, 9)) if collected else None)


# Versions


def test_versions_are_ordered_as_they_were_served_and_never_reused() -> None:
    versions = WeightVersions()
    heard: list[str] = []
    versions.on_change(lambda served: heard.append(served.name))
    versions.serve("9", "folder /a")
    versions.serve("2", "folder /b")
    assert (versions.lag("9"), versions.lag("2"), versions.lag("never")) == (1, 0, None)
    assert versions.lag("9+sql") == 1, "an adapter is as old as the weights below it"
    versions.serve("2", "folder /b")
    assert heard == ["9", "2"], "the current one again is no new one"
    with pytest.raises(Conflict, match="names other weights"):
        versions.check("2", "folder /c")
    with pytest.raises(Conflict, match="served before"):
        versions.check("9", "folder /a")
