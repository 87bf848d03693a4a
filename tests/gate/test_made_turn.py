"""Turns that are made without validation equal validated ones, in every field and in the bytes that are stored."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from turnstile.models import (
    Break,
    BreakReason,
    Message,
    ParseStatus,
    SamplingUsed,
    Thread,
    Turn,
    TurnTimings,
    WeightSpan,
)
from turnstile.models.messages import ToolCall
from turnstile.models.turn import BreakAt
from turnstile_server.capture.compare import Cosmetic
from turnstile_server.gate.made_turn import made_timings, made_turn
from turnstile_server.journal.records import turn_record
from turnstile_server.journal.segments import encode, record_header

TEXT = st.text(max_size=8)
NUMBER = st.floats(0, 1e6, allow_nan=False)
IDS = st.lists(st.integers(0, 2**31 - 1), max_size=12)
MESSAGE = st.builds(
    Message,
    role=st.sampled_from(["system", "user", "assistant", "tool"]),
    content=TEXT,
    reasoning=st.none() | TEXT,
    tool_calls=st.lists(st.builds(ToolCall, TEXT, TEXT, st.none() | TEXT), max_size=2).map(tuple),
    tool_call_id=st.none() | TEXT,
    name=st.none() | TEXT,
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | NUMBER | TEXT,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(TEXT, inner, max_size=2),
    max_leaves=5,
)
TIMES = st.fixed_dictionaries(
    {name: st.integers(0, 9) if name == "pieces" else NUMBER for name in TurnTimings.model_fields}
    | {"first_token_s": st.none() | NUMBER}
)


@st.composite
def fields(draw: st.DrawFn) -> dict[str, Any]:
    """As ``TurnBuilder`` has them, of every kind that it can have."""
    completion = draw(IDS.filter(bool))
    count = len(completion)
    cuts = sorted({0, count, *draw(st.lists(st.integers(0, count), max_size=2))})
    spans = tuple(
        WeightSpan(start=start, end=end, version=draw(TEXT), stale_kv=draw(st.booleans()))
        for start, end in itertools.pairwise(cuts)
    )
    reason = draw(st.none() | st.sampled_from(BreakReason))
    at = draw(st.none() | st.builds(BreakAt, message=st.integers(0, 9), path=TEXT, kind=TEXT))
    return {
        "turn_id": draw(TEXT),
        "episode_id": draw(TEXT),
        "parent_id": draw(st.none() | TEXT),
        "seq": draw(st.integers(0, 99)),
        "dialect": draw(TEXT),
        "context_ids": np.array(draw(IDS), np.int32),
        "completion_ids": np.array(completion, np.int32),
        "logprobs": np.array([draw(st.floats(-50, 0, width=32)) for _ in completion], np.float32),
        "weight_spans": spans,
        "routed_experts": None,
        "finish_reason": draw(st.sampled_from(["stop", "length", "abort"])),
        "stop_string": draw(st.none() | TEXT),
        "sampling": SamplingUsed(
            max_new_tokens=draw(st.integers(1, 9)), stop=tuple(draw(st.lists(TEXT, max_size=2)))
        ),
        "asked_sampling": draw(st.dictionaries(TEXT, JSON, max_size=3)),
        "template_hash": draw(TEXT),
        "tools_key": draw(TEXT),
        "request_key": draw(TEXT),
        "new_messages": tuple(draw(st.lists(MESSAGE, max_size=3))),
        "reply": draw(MESSAGE),
        "break": None if reason is None else Break(reason=reason, at=at, continues=draw(st.none() | TEXT)),
        "parse_status": tuple(draw(st.lists(st.sampled_from(ParseStatus), max_size=2))),
        "thread": draw(st.none() | st.builds(Thread, name=st.none() | TEXT, parent=st.none() | TEXT)),
        "step": draw(st.integers(0, 3)),
        "echo": tuple(map(str, draw(st.lists(st.sampled_from(Cosmetic), max_size=2)))),
        "rerendered_tokens": draw(st.integers(0, 99)),
        "timings": TurnTimings(**draw(TIMES)),
    }


def stored(turn: Turn) -> bytes:
    encoded = encode(turn_record(turn))
    return b"".join([record_header(encoded), *encoded.parts])


@given(fields())
def test_a_made_turn_is_the_validated_one(given_fields: dict[str, Any]) -> None:
    made, validated = made_turn(given_fields), Turn(**given_fields)
    assert list(made.__dict__) == list(validated.__dict__), "the order in which they are written"
    for name, value in validated.__dict__.items():
        own = made.__dict__[name]
        assert type(own) is type(value)
        if isinstance(value, np.ndarray):
            assert (own.dtype, own.tolist(), own.flags.writeable) == (value.dtype, value.tolist(), False)
        else:
            assert own == value
    assert made.model_fields_set == validated.model_fields_set
    assert made.model_dump_json() == validated.model_dump_json()
    assert stored(made) == stored(validated)
    with pytest.raises(ValueError, match="frozen"):
        made.seq = 1  # type: ignore[misc]


@given(fields(), st.sampled_from(["empty", "short", "infinite", "gap", "experts"]))
def test_fields_that_contradict_each_other_are_refused_as_a_validated_turn_refuses_them(
    given_fields: dict[str, Any], fault: str
) -> None:
    wrong = dict(given_fields)
    match fault:
        case "empty":
            wrong |= {"completion_ids": np.array([], np.int32), "logprobs": np.array([], np.float32)}
        case "short":
            wrong["logprobs"] = wrong["logprobs"][:-1]
        case "infinite":
            wrong["logprobs"] = np.full(len(wrong["logprobs"]), -np.inf, np.float32)
        case "gap":
            wrong["weight_spans"] = wrong["weight_spans"][1:]
        case "experts":
            wrong["routed_experts"] = np.zeros((0, 1, 1), np.uint8)
    with pytest.raises(ValueError, match="Turn") as validated:
        Turn(**wrong)
    with pytest.raises(ValueError, match=r"turn|logprob|spans|experts") as made:
        made_turn(wrong)
    assert str(made.value).strip() in str(validated.value)


@given(TIMES)
def test_made_timings_are_the_validated_ones(times: dict[str, Any]) -> None:
    made, validated = made_timings(**times), TurnTimings(**times)
    assert made == validated
    assert made.model_fields_set == validated.model_fields_set
    assert made.model_dump_json() == validated.model_dump_json()


@given(fields())
def test_what_a_turn_was_made_of_may_change(given_fields: dict[str, Any]) -> None:
    turn = made_turn(given_fields)
    before = turn.completion_ids.tolist()
    given_fields["completion_ids"][0] ^= 1
    assert turn.completion_ids.tolist() == before
