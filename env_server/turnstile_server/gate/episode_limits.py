"""An episode's plan for its model calls: their limits, and the headers that name their conversation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from turnstile.models import Thread


@dataclass(frozen=True, slots=True)
class CallLimits:
    """An episode's limits after the server's ceilings: whole numbers, none open."""

    max_turns: int
    max_completion_tokens: int
    max_sampled_tokens: int
    max_record_bytes: int
    """Bytes of the records of its turns."""
    max_calls: int
    """Calls in flight at once."""
    max_refusals: int


@dataclass(frozen=True, slots=True)
class ConversationHeaders:
    """Names of the headers in which the agent names the conversation of a call, in any case; None where it names
    none."""

    name: str | None = None
    parent: str | None = None

    def read(self, headers: Mapping[str, str]) -> Thread | None:
        """``headers`` by lower-case name."""
        name = headers.get(self.name.lower()) if self.name is not None else None
        parent = headers.get(self.parent.lower()) if self.parent is not None else None
        return Thread(name=name, parent=parent) if name or parent else None
