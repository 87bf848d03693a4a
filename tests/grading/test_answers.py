"""Submitted answers, judged."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from turnstile_server.grading.answers import judge_answer, parse_number
from turnstile_server.tasks.answer import Answer

pytestmark = pytest.mark.anyio

CASES: list[tuple[dict[str, Any], str | None, bool]] = [
    ({"value": "Paris"}, "Paris", True),
    ({"value": "Paris"}, "  Paris\n", True),
    ({"value": "Paris"}, "paris", False),
    ({"value": "Paris", "ignore_case": True}, "PARIS", True),
    ({"value": "Paris"}, "The answer is Paris", False),
    ({"value": "Paris"}, "", False),
    ({"value": "Paris"}, None, False),
    ({"kind": "numeric", "value": 42}, "42", True),
    ({"kind": "numeric", "value": 42}, " 42.0 ", True),
    ({"kind": "numeric", "value": 1234.5}, "1,234.5", True),
    ({"kind": "numeric", "value": 1e6}, "1e6", True),
    ({"kind": "numeric", "value": -0.5}, "-.5", True),
    ({"kind": "numeric", "value": 42}, "42 or 43", False),
    ({"kind": "numeric", "value": 42}, "41.9", False),
    ({"kind": "numeric", "value": 42, "tolerance": 0.1}, "41.9", True),
    ({"kind": "numeric", "value": 0.3, "tolerance": 0.1}, "0.4", True),
    ({"kind": "numeric", "value": 42, "tolerance": 0.1}, "41.89", False),
    ({"kind": "regex", "value": r"a+b"}, "aaab", True),
    ({"kind": "regex", "value": r"a+b"}, "xaab", False),
    ({"kind": "regex", "value": r"a+b"}, "aabx", False),
    ({"kind": "regex", "value": r"a+b", "ignore_case": True}, "AAB", True),
]


@pytest.mark.parametrize(("wanted", "given", "right"), CASES)
async def test_an_answer_is_right_or_wrong(wanted: dict[str, Any], given: str | None, right: bool) -> None:
    verdict = await judge_answer(Answer.model_validate(wanted), given, regex_timeout_s=30.0)
    assert verdict.right is right
    assert bool(verdict.note) is not right


@pytest.mark.parametrize(
    "text",
    [
        "",
        ".",
        "-",
        "nan",
        "inf",
        "-Infinity",
        "1e",
        "e5",
        ".e5",
        "0x10",
        "1_000",
        "1,23",
        "1 2",
        "٣",
        "1e9999",
        "9" * 200,
    ],
)
def test_what_is_not_one_finite_number_is_none(text: str) -> None:
    assert parse_number(text) is None


async def test_a_match_that_takes_too_long_is_ended_and_wrong() -> None:
    slow = Answer(kind="regex", value="(a+)+b")
    verdict = await judge_answer(slow, "a" * 40, regex_timeout_s=0.5)
    assert not verdict.right
    assert "0.5 s" in verdict.note


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ({"kind": "numeric", "value": "42"}, "a number"),
        ({"kind": "exact", "value": 42}, "quote it"),
        ({"kind": "regex", "value": "("}, "not a regular expression"),
        ({"kind": "exact", "value": "x", "tolerance": 1}, "kind: numeric"),
        ({"kind": "numeric", "value": "nan"}, "a number"),
    ],
)
def test_an_answer_that_does_not_fit_its_kind_is_refused(answer: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        Answer.model_validate(answer)
