"""Which weights sampled which tokens of one completion, gathered chunk by chunk.

What must hold: the spans tile ``[0, tokens)``, neighbours have different versions (or differ in ``stale_kv``),
and a token whose weights are not known is in a span of ``UNKNOWN_WEIGHTS``. No version is ever guessed.
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
        self._stale_kv = False

    def add(self, count: int, version: str | None, stale_kv: bool = False) -> None:
        """``count`` more tokens, sampled by the weights ``version``; None where that is not known. ``stale_kv``:
        on an attention cache of older weights."""
        named = UNKNOWN_WEIGHTS if version is None else version
        if count and self._end > self._start and (named, stale_kv) != (self._version, self._stale_kv):
            self._closed.append(self._last())
            self._start = self._end
        if count:
            self._version, self._stale_kv = named, stale_kv
            self._end += count

    @property
    def spans(self) -> tuple[WeightSpan, ...]:
        """Empty when there are no tokens."""
        return (*self._closed, self._last()) if self._end else ()

    def _last(self) -> WeightSpan:
        return WeightSpan(start=self._start, end=self._end, version=self._version, stale_kv=self._stale_kv)
