"""The rules by which a call ends by itself: stop ids, stop strings, the length limit. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

SLACK_TOKENS: Final = 8
"""A stop string of n bytes spans at most n tokens; a few more cover tokens that decode to nothing."""


@dataclass(frozen=True, slots=True)
class StopRule:
    """When a call ends. ``stop_ids`` end it when sampled, ``strings`` when its text first contains one; the
    matching tokens stay in the output."""

    max_new_tokens: int
    stop_ids: frozenset[int]
    strings: tuple[str, ...]

    def check(self, output: Sequence[int], decode: Callable[[Sequence[int]], str]) -> dict[str, object] | None:
        """The ``finish_reason`` after the last id of ``output`` was sampled, None to go on."""
        if output[-1] in self.stop_ids:
            return {"type": "stop", "matched": output[-1]}
        if self.strings:
            # Earlier tokens were checked when they were sampled.
            reach = max(len(text.encode()) for text in self.strings) + SLACK_TOKENS
            tail = decode(output[-reach:])
            for text in self.strings:
                if text in tail:
                    return {"type": "stop", "matched": text}
        if len(output) >= self.max_new_tokens:
            return {"type": "length", "length": len(output)}
        return None
