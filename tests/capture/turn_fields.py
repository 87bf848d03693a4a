"""Random turns: fields of every kind that the gate's ``TurnBuilder`` can have."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
from hypothesis import strategies as st

from turnstile.models import (
    Break,
    BreakReason,
    Message,
    ParseStatus,
    SamplingUsed,
    Thread,
    TurnTimings,
    WeightSpan,
)
from turnstile.models.messages import ToolCall
from turnstile.models.turn import BreakAt
from turnstile_server.capture.compare import Cosmetic

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
def turn_fields(draw: st.DrawFn) -> dict[str, Any]:
    """As ``TurnBuilder`` has them."""
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
        "parse_notes": tuple(draw(st.lists(st.text(max_size=5), max_size=2))),
        "without_token": tuple(sorted(draw(st.sets(st.integers(0, count - 1), max_size=2)))),
        "thread": draw(st.none() | st.builds(Thread, name=st.none() | TEXT, parent=st.none() | TEXT)),
        "step": draw(st.integers(0, 3)),
        "echo": tuple(map(str, draw(st.lists(st.sampled_from(Cosmetic), max_size=2)))),
        "rerendered_tokens": draw(st.integers(0, 99)),
        "upstream": None,
        "timings": TurnTimings(**draw(TIMES)),
    }
