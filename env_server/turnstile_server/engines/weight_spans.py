"""Which weights sampled which tokens of one completion, gathered chunk by chunk.

What must hold: the spans tile ``[0, tokens)``, neighbours have different versions, and a token whose weights are
not known is in a span of ``UNKNOWN_WEIGHTS``. No version is ever guessed.
"""

from __future__ import annotations

from typing import Final

from turnstile.models import WeightSpan

UNKNOWN_WEIGHTS: Final = "unknown"


class WeightSpans:
    """Spans that grow with the completion."""

    def __init__(self) -> None:
        self._closed: list[WeightSpan] = []
        self._start = self._end = 0
        self._version = UNKNOWN_WEIGHTS

    def add(self, count: int, version: str | None) -> None:
        """``count`` more tokens, sampled by the weights ``version``; None where that is not known."""
        named = UNKNOWN_WEIGHTS if version is None else version
        if count and self._end > self._start and named != self._version:
            self._closed.append(self._last())
            self._start = self._end
        if count:
            self._version = named
            self._end += count

    @property
    def spans(self) -> tuple[WeightSpan, ...]:
        """Empty when there are no tokens."""
        return (*self._closed, self._last()) if self._end else ()

    def _last(self) -> WeightSpan:
        return WeightSpan(start=self._start, end=self._end, version=self._version)
