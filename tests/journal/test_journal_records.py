"""The codec of turns: bit-exact there and back through the bytes of a segment."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from turnstile.models import (
    Break,
    BreakAt,
    BreakReason,
    Delivery,
    Discard,
    Message,
    ParseStatus,
    SamplingUsed,
    ToolCall,
    Turn,
    TurnTimings,
    WeightSpan,
)
from turnstile_server.journal import (
    delivery_of,
    delivery_record,
    discard_of,
    discard_record,
    turn_of,
    turn_record,
)
from turnstile_server.journal.protocol import Record
from turnstile_server.journal.segments import decode, encode

HOSTILE = st.text() | st.sampled_from(["\x00", "\u2028", "\U0001f642", '"\\', "<|im_end|>", "\ufeff", "e\u0301"])
FINITE = st.floats(allow_nan=False, allow_infinity=False)
CALLS = st.builds(ToolCall, name=HOSTILE, arguments=HOSTILE, id=st.none() | HOSTILE)
MESSAGES = st.builds(
    Message,
    role=st.sampled_from(["system", "developer", "user", "assistant", "tool"]),
    content=HOSTILE,
    reasoning=st.none() | HOSTILE,
    tool_calls=st.lists(CALLS, max_size=2).map(tuple),
    tool_call_id=st.none() | HOSTILE,
    name=st.none() | HOSTILE,
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | FINITE | HOSTILE,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(HOSTILE, inner, max_size=3),
    max_leaves=6,
)
BREAKS = st.builds(
    Break,
    reason=st.sampled_from(BreakReason),
    at=st.none() | st.builds(BreakAt, message=st.integers(0, 9), path=HOSTILE, kind=HOSTILE),
)


@st.composite
def turns(draw: st.DrawFn) -> Turn:
    count = draw(st.integers(1, 12))
    ids = st.integers(0, 2**31 - 1)
    cut = draw(st.integers(0, count - 1))
    spans = [WeightSpan(start=cut, end=count, version=draw(HOSTILE), stale_kv=draw(st.booleans()))]
    if cut:
        spans.insert(0, WeightSpan(start=0, end=cut, version="w0"))
    return Turn(
        turn_id=draw(HOSTILE),
        episode_id=draw(HOSTILE),
        parent_id=draw(st.none() | HOSTILE),
        seq=draw(st.integers(0, 2**40)),
        dialect="chat",
        context_ids=draw(hnp.arrays(np.int32, st.integers(0, 12), elements=ids)),
        completion_ids=draw(hnp.arrays(np.int32, count, elements=ids)),
        logprobs=draw(hnp.arrays(np.float32, count, elements=st.floats(-(2.0**100), 0, width=32))),
        weight_spans=tuple(spans),
        finish_reason=draw(st.sampled_from(["stop", "length", "abort"])),
        sampling=SamplingUsed(
            temperature=draw(FINITE), max_new_tokens=draw(st.integers(1, 2**31)), stop=(draw(HOSTILE),)
        ),
        asked_sampling=draw(st.dictionaries(HOSTILE, JSON, max_size=3)),
        template_hash=draw(HOSTILE),
        tools_key=draw(HOSTILE),
        request_key=draw(HOSTILE),
        new_messages=tuple(draw(st.lists(MESSAGES, max_size=3))),
        reply=draw(MESSAGES),
        break_=draw(st.none() | BREAKS),
        parse_status=tuple(draw(st.lists(st.sampled_from(ParseStatus), max_size=2))),
        rerendered_tokens=draw(st.integers(0, 9)),
        timings=TurnTimings(started_at=draw(FINITE), total_s=draw(FINITE), first_token_s=draw(st.none() | FINITE)),
    )


def through_the_disk(record: Record) -> Record:
    return decode(record.type, b"".join(encode(record).parts))


@given(turns())
def test_a_turn_comes_back_equal_in_every_field_and_every_bit(turn: Turn) -> None:
    record = turn_record(turn)
    assert not set(record.meta) & set(record.arrays)
    back = turn_of(through_the_disk(record))
    for name in Turn.model_fields:
        mine, theirs = getattr(turn, name), getattr(back, name)
        if isinstance(mine, np.ndarray):
            assert (mine.dtype, mine.tobytes()) == (theirs.dtype, theirs.tobytes())
            assert not theirs.flags.writeable
        else:
            assert mine == theirs
            assert repr(mine) == repr(theirs), "equal, but not the same: an int for a float, -0.0 for 0.0"


@given(HOSTILE, st.sampled_from(["written", "lost"]))
def test_a_delivery_comes_back(turn_id: str, state: str) -> None:
    delivery = Delivery.model_validate({"turn_id": turn_id, "state": state})
    record = through_the_disk(delivery_record("e", delivery))
    assert delivery_of(record) == delivery
    assert record.episode_id == "e"


@given(HOSTILE, st.integers(0, 2**62))
def test_a_discard_comes_back(reason: str, tokens: int) -> None:
    discard = Discard(reason=reason, tokens=tokens)
    assert discard_of(through_the_disk(discard_record("e", discard))) == discard
