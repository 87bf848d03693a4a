"""Turns that are made without validation equal validated ones, in every field and in the bytes that are stored."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from capture.turn_fields import TIMES, turn_fields
from turnstile.models import Turn, TurnTimings
from turnstile_server.gate.made_turn import made_timings, made_turn
from turnstile_server.journal.records import turn_record
from turnstile_server.journal.segments import encode, record_header


def stored(turn: Turn) -> bytes:
    encoded = encode(turn_record(turn))
    return b"".join([record_header(encoded), *encoded.parts])


@given(turn_fields())
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


@given(turn_fields(), st.sampled_from(["empty", "short", "infinite", "gap", "experts"]))
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


@given(turn_fields())
def test_what_a_turn_was_made_of_may_change(given_fields: dict[str, Any]) -> None:
    turn = made_turn(given_fields)
    before = turn.completion_ids.tolist()
    given_fields["completion_ids"][0] ^= 1
    assert turn.completion_ids.tolist() == before
