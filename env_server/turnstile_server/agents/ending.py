"""What an agent's own log says about how it ended: for agents whose exit codes tell nothing, or the wrong thing.

The log is JSON lines on standard output. Lines that are none (a banner, a line cut off by a bound) are passed
over. Pure: no I/O.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from turnstile_server.agents.spec import EndRule, Match, Scalar


@dataclass(frozen=True, slots=True)
class Ending:
    failed: bool
    """Else it did what it could, and its work is graded."""
    reason: str | None
    """In the agent's words."""


def ending(rules: Sequence[EndRule], log: str) -> Ending | None:
    """By the first rule that applies; None where none does, and the exit code decides."""
    if not rules:
        return None
    events = _events(log)
    for rule in rules:
        event = next((event for event in reversed(events) if _has(event, rule.last)), None)
        if event is not None and _has(event, rule.when):
            return Ending(rule.means == "failed", None if rule.reason is None else _text(_at(event, rule.reason)))
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
    for name in path.split("."):
        if isinstance(event, dict):
            event = event.get(name, _MISSING)
        elif isinstance(event, list) and name.isdecimal() and int(name) < len(event):
            event = event[int(name)]
        else:
            return _MISSING
    return event


def _has(event: Mapping[str, Any], wanted: Mapping[str, Scalar | Match]) -> bool:
    return all(_is(_at(event, path), value) for path, value in wanted.items())


def _is(found: Any, wanted: Scalar | Match) -> bool:
    if isinstance(wanted, Match):
        return isinstance(found, str) and re.search(wanted.match, found) is not None
    if wanted is None:
        return found is None or found is _MISSING
    return type(found) is type(wanted) and found == wanted  # of one type: JSON's true is no 1


def _text(value: Any) -> str | None:
    if value is _MISSING or value is None:
        return None
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
