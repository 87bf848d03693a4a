"""Reads from an agent's own log how it ended, by the rules of its spec.

Some agents exit 0 after a failure, others with 1 at a limit of turns; their logs say which it was. The log is JSON
lines on standard output. Lines that are no JSON (a banner, a line cut off by a bound) are skipped. Pure: no I/O.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from turnstile_server.agents.spec import EndRule, Scalar, TextPattern


@dataclass(frozen=True, slots=True)
class LoggedEnding:
    """The end of an agent, by its own log."""

    failed: bool
    """The agent failed, and the episode has no reward. False: its work is graded."""
    reason: str | None
    """In the agent's words."""


def read_ending(rules: Sequence[EndRule], log: str) -> LoggedEnding | None:
    """The ending by the first rule that applies. None where no rule applies; then the exit code decides."""
    if not rules:
        return None
    events = _events(log)
    for rule in rules:
        event = next((event for event in reversed(events) if _has(event, rule.last)), None)
        if event is not None and _has(event, rule.when):
            return LoggedEnding(
                rule.means == "failed", None if rule.reason is None else _text(_at(event, rule.reason))
            )
    return None


def _events(log: str) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = []
    for line in log.splitlines():
        if line.startswith("{"):
            try:
                event = json.loads(line)
            except (ValueError, RecursionError):
                continue
            events.append(event)
    return events


_MISSING = object()


def _at(event: Any, path: str) -> Any:
    """The value of the field ``path`` (`a.b`, `a.0`), or ``_MISSING``."""
    for name in path.split("."):
        if isinstance(event, dict):
            event = event.get(name, _MISSING)
        elif isinstance(event, list) and name.isdecimal() and int(name) < len(event):
            event = event[int(name)]
        else:
            return _MISSING
    return event


def _has(event: Mapping[str, Any], wanted: Mapping[str, Scalar | TextPattern]) -> bool:
    return all(_is(_at(event, path), value) for path, value in wanted.items())


def _is(found: Any, wanted: Scalar | TextPattern) -> bool:
    if isinstance(wanted, TextPattern):
        return isinstance(found, str) and re.search(wanted.match, found) is not None
    if wanted is None:
        return found is None or found is _MISSING
    return (
        type(found) is type(wanted) and found == wanted
    )  # of one type: in Python true equals 1, in JSON it does not


def _text(value: Any) -> str | None:
    if value is _MISSING or value is None:
        return None
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
