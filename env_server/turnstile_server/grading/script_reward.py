"""The reward that a script wrote: pure functions from the files that it left to numbers.

The rules are Harbor's: ``reward.json`` counts before ``reward.txt``; the one is an object of finite numbers, where
``true`` is 1, the other one number. What must hold: whatever is not such a number is an error that says what was
there. It is never taken as 0.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from turnstile_server.grading.verdict import printable

JSON_FILE, TEXT_FILE = "reward.json", "reward.txt"
REWARD_FILES = (JSON_FILE, TEXT_FILE)
_SHOWN = 200


class NoReward(ValueError):
    """The files are no reward. The message says why."""


@dataclass(frozen=True, slots=True)
class ScriptReward:
    """The reward that a script wrote."""

    value: float
    rewards: Mapping[str, float]
    """All numbers of ``reward.json``; ``reward`` alone of a text."""
    file: str


def read_reward(files: Mapping[str, Mapping[str, str]], key: str) -> ScriptReward:
    """``files``: as ``inside/read_reward.py`` reports them. Raises NoReward."""
    name = next((each for each in REWARD_FILES if each in files), None)
    if name is None:
        raise NoReward(f"the script left neither {JSON_FILE} nor {TEXT_FILE} in /logs/verifier")
    found = files[name]
    if "fault" in found:
        raise NoReward(f"{name} cannot be read: {found['fault']}")
    text = _decoded(name, found["text"])
    if not text.strip():
        raise NoReward(f"{name} is empty")
    rewards = _of_json(text) if name == JSON_FILE else {"reward": _of_text(text)}
    if name == TEXT_FILE:
        value = rewards["reward"]
    elif key in rewards:
        value = rewards[key]
    else:
        raise NoReward(
            f"{name} has no key {key!r}, which is the reward; it has {_shown(', '.join(rewards)) or 'none'}: "
            "name the one to take (`reward_key` of the script, or `?reward_key=NAME` behind the source's path)"
        )
    return ScriptReward(value, rewards, name)


def _decoded(name: str, latin: str) -> str:
    try:
        return latin.encode("latin-1").decode()
    except UnicodeDecodeError:
        raise NoReward(f"{name} is not UTF-8") from None


def _of_text(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise NoReward(f"{TEXT_FILE} is not one number: {_shown(text)}") from None
    if not math.isfinite(value):
        raise NoReward(f"{TEXT_FILE} says {_shown(text)}, which is no finite number")
    return value


def _of_json(text: str) -> dict[str, float]:
    try:
        found = json.loads(text, parse_constant=_no_constant, object_pairs_hook=_no_twins)
    except (ValueError, RecursionError) as error:
        raise NoReward(f"{JSON_FILE} is not JSON: {_shown(str(error))}") from None
    if not isinstance(found, dict):
        raise NoReward(f"{JSON_FILE} is not an object of numbers: {_shown(text)}")
    return {name: _number(name, each) for name, each in found.items()}


def _number(name: str, value: Any) -> float:
    if not isinstance(value, (int, float)):
        raise NoReward(f"{JSON_FILE}: {_shown(name)!r} is not a number: {_shown(json.dumps(value))}")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise NoReward(f"{JSON_FILE}: {_shown(name)!r} is no finite number")
    return number


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no finite number")


def _no_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key is given twice")
    return found


def _shown(text: str) -> str:
    return printable(text.strip())[:_SHOWN]
