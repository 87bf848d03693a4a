"""The states of one work folder as lines of JSON, each what changed against the state before. Pure.

A line that is not whole (the server was killed) is no state, and nor is what follows it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from turnstile.models import ReplayFile, ReplayMoment


@dataclass(frozen=True, slots=True)
class StateRecord:
    """One state. ``set``: files that are new or otherwise than before; ``gone``: paths that are not there any
    more. ``further``: paths that were not looked at. ``missed``: why the folder could not be looked at."""

    moment: ReplayMoment
    turn_id: str | None
    at_s: float
    set: tuple[ReplayFile, ...] = ()
    gone: tuple[str, ...] = ()
    further: int = 0
    missed: str | None = None

    def line(self) -> bytes:
        fields: dict[str, Any] = {"moment": self.moment, "turn_id": self.turn_id, "at_s": self.at_s}
        if self.set:
            fields["set"] = [[one.path, one.mode, one.size, one.digest, one.left_out] for one in self.set]
        for name, value in (("gone", self.gone), ("further", self.further), ("missed", self.missed)):
            if value:
                fields[name] = value
        return json.dumps(fields).encode() + b"\n"


def read_states(data: bytes) -> list[StateRecord]:
    """As many as are whole."""
    found: list[StateRecord] = []
    for line in data.splitlines(keepends=True):
        if not line.endswith(b"\n"):
            break
        try:
            fields = json.loads(line)
            files = (dict(zip(_FIELDS, one, strict=True)) for one in fields.pop("set", ()))
            read = tuple(ReplayFile.model_validate(one) for one in files)
            found.append(StateRecord(**fields, set=read))
        except (ValueError, TypeError):
            break
    return found


_FIELDS = ("path", "mode", "size", "digest", "left_out")
