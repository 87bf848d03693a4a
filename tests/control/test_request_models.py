"""Bodies of the control API as models: numbers beyond a range are refused by name, whatever their size."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from turnstile.models import CompletionRequest
from turnstile.models.base import MAX_JSON_DEPTH, check_json
from turnstile_server.control.body import json_bytes, parse_json


@pytest.mark.parametrize("ids", [[2**31], [2**63], [2**64], [-1, 2**63], [10**4000], [1.5], [True], ["1"], [None]])
def test_completion_ids_that_are_no_int32_are_refused_by_name(ids: list[Any]) -> None:
    with pytest.raises(ValidationError, match="completion_ids") as refused:
        CompletionRequest.model_validate({"call_id": "c", "completion_ids": ids, "logprobs": [-1.0] * len(ids)})
    (error,) = refused.value.errors()
    assert len(error["msg"]) < 200


@pytest.mark.parametrize("logprob", [10**400, "x", None, [1]])
def test_logprobs_that_are_no_numbers_are_refused_by_name(logprob: Any) -> None:
    with pytest.raises(ValidationError, match="logprobs"):
        CompletionRequest.model_validate({"call_id": "c", "completion_ids": [1], "logprobs": [logprob]})


@pytest.mark.parametrize(
    "value", [2**1024 - 1, -(2**1024) + 1, 2**64, 1e308, 5e-324, -0.0, "\U0001f600", True, None, [], {}]
)
def test_free_json_is_read_and_written_exactly(value: Any) -> None:
    text = json_bytes(check_json({"v": [value]}))
    back = parse_json(text)["v"][0]
    assert (type(back), repr(back)) == (type(value), repr(value))


@pytest.mark.parametrize(
    ("value", "place"),
    [
        ({"a": [0, 2**1024]}, r"a\.1 is an integer"),
        ({"a": {"b": float("nan")}}, r"a\.b is not a finite"),
        ({"a": "\udc80"}, "a has a lone surrogate"),
        ({"\udc80": 1}, "the value has a name"),
        ({1: 1}, "the value has a name"),
        ({"a": {1, 2}}, "a is of type set"),
        ({"a" * 500: [float("inf")]}, "…a+"),
    ],
)
def test_free_json_beyond_the_bounds_is_refused_with_its_place(value: Any, place: str) -> None:
    with pytest.raises(ValueError, match=place) as refused:
        check_json(value)
    assert len(str(refused.value)) < 300


def test_nesting_is_bounded_where_it_says() -> None:
    value: Any = 1
    for _ in range(MAX_JSON_DEPTH):
        value = [value]
    assert check_json(value) is value
    with pytest.raises(ValueError, match="nested deeper than 100 levels"):
        check_json([value])
