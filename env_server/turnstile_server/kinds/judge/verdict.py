"""Reads a judge's reply. Pure.

A verdict is one JSON object of one form, and nothing else: two verdicts, a number out of its range, further fields
or prose are no verdict, which is not "wrong".
"""

from __future__ import annotations

import json
import re
from typing import Any

from turnstile_server.kinds.judge.options import JudgeOptions

_FENCED = re.compile(r"```(?:json)?\s*\n(.*)\n\s*```", re.DOTALL)
_THOUGHT = re.compile(r"\s*<think>.*?</think>", re.DOTALL)
MAX_REASON_CHARS = 2000


class NoVerdict(ValueError):
    """The reply holds no verdict. The message says why."""


def reply_rule(options: JudgeOptions) -> str:
    """The part of the prompt that tells the judge the form of its reply."""
    if options.compare:
        form, values = '"better": VERDICT', '"first", "second" or "equal"'
    elif options.scale is not None:
        low, high = options.scale
        form, values = '"score": VERDICT', f"a number from {low:g} to {high:g}"
    else:
        form, values = '"verdict": VERDICT', '"right" or "wrong"'
    return (
        f'Reply with one JSON object and nothing else: {{"reason": "a short reason", {form}}}, where VERDICT is '
        f"{values}."
    )


def read_verdict(reply: str, options: JudgeOptions, *, swapped: bool = False) -> float:
    """The verdict as a number in [0, 1]. ``swapped``: the work was shown as the second of two. Raises
    NoVerdict."""
    found = _object(_THOUGHT.sub("", reply, count=1).strip())
    name = "better" if options.compare else "score" if options.scale is not None else "verdict"
    if name not in found or found.keys() - {name, "reason"}:
        raise NoVerdict(
            f"the reply has the fields {', '.join(map(repr, found))}; `{name}` and `reason` are wanted"
        )
    value = found[name]
    if options.scale is not None and not options.compare:
        return _on_scale(value, *options.scale)
    ranks: dict[Any, float] = {"right": 1.0, "wrong": 0.0}
    if options.compare:
        ranks = {"first": float(not swapped), "second": float(swapped), "equal": options.equal}
    if not isinstance(value, str) or value not in ranks:
        raise NoVerdict(f"`{name}` is {value!r:.100}, not one of {', '.join(ranks)}")
    return ranks[value]


def _on_scale(value: object, low: float, high: float) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise NoVerdict(f"`score` is {value!r:.100}, not a number")
    if not low <= value <= high:  # of no float, too: an integer may be larger than any
        raise NoVerdict(f"`score` is {value!r:.100}, not from {low:g} to {high:g}")
    return (value - low) / (high - low)


def _object(text: str) -> dict[str, Any]:
    fenced = _FENCED.fullmatch(text)
    try:
        found = json.loads(fenced[1] if fenced else text, object_pairs_hook=_once, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise NoVerdict(f"the reply is not one JSON object: {error}") from None
    if not isinstance(found, dict):
        raise NoVerdict("the reply is JSON, but no object")
    return found


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a field is given twice")
    return found


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no number")
