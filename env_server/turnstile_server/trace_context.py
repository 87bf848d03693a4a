"""The trace that an episode belongs to, by W3C Trace Context: its ids, and the header that passes it on.

Ids are derived, not drawn: whoever knows an episode knows the ids of its spans, also after a restart, and an
engine is told the id of a model call whose span is exported much later.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass

_TRACEPARENT = re.compile(r"00-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})")
_SAMPLED = 1


@dataclass(frozen=True, slots=True)
class TraceContext:
    """``trace_id``: 32 hex digits; ``parent_id``: 16, of the trainer's span, None: the episode is a trace of its
    own. ``exported``: this server exports spans, so they are the parents of the engine's."""

    episode_id: str
    trace_id: str
    parent_id: str | None
    sampled: bool
    exported: bool

    @staticmethod
    def of(episode_id: str, traceparent: str | None, *, exported: bool) -> TraceContext | None:
        """None where there is nothing to pass on. ``traceparent``: as it was checked when the episode was made."""
        found = None if traceparent is None else _TRACEPARENT.fullmatch(traceparent)
        if found is not None:
            trace_id, parent_id, flags = found.groups()
            return TraceContext(episode_id, trace_id, parent_id, bool(int(flags, 16) & _SAMPLED), exported)
        return TraceContext(episode_id, _hex(episode_id, 16), None, True, True) if exported else None

    def span_id(self, name: str) -> str:
        """The id of a span by its name: the ``span_id`` of its report. The empty name is the episode's span."""
        return _hex(f"{self.episode_id}/{name}", 8)

    def header(self, span: str) -> str:
        """The ``traceparent`` of what happens within a span."""
        parent_id = self.span_id(span) if self.exported or self.parent_id is None else self.parent_id
        return f"00-{self.trace_id}-{parent_id}-{int(self.sampled):02x}"


def is_traceparent(text: str) -> bool:
    """True if the text is a header as version 00 of the recommendation defines it: no id is all zeros."""
    found = _TRACEPARENT.fullmatch(text)
    return found is not None and all(int(part, 16) for part in found.groups()[:2])


def _hex(text: str, size: int) -> str:
    return hashlib.blake2b(text.encode(), digest_size=size).hexdigest()
