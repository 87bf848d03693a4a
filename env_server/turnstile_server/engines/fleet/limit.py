"""The limit on the calls that a worker is given at once: congestion control, after the way TCP finds its window.
Pure.

A worker that has more calls than its cache holds takes some of them back (a retraction: their cache is thrown away
and computed again), so that throughput falls the more it is given. A fixed limit is wrong for some model, some
length of prompt and some moment. So the limit follows what the engine says of itself:

- It grows while all of it is used: to double per observation at first, by one per observation after the first sign
  of congestion.
- It is cut to ``CUT`` of the calls that run when the engine has retracted calls, or when its cache is almost full
  and calls wait for it (multiplicative decrease, as Jacobson 1988), at most once per ``COOL_OBSERVATIONS``.
- It is lowered to what runs, and a few, when calls wait in the engine's own queue: there they have no order of
  ours, and waiting there makes nothing faster (delay as the sign, as TCP Vegas).
"""

from __future__ import annotations

from collections import deque
from typing import Final

from turnstile_server.engines.protocol import EngineLoad

CUT: Final = 0.75
KV_FULL: Final = 0.95
QUEUE_SHARE: Final = 0.1
"""Calls that may wait in the engine, as a share of those that run (at least one): they keep it busy."""
PATIENCE: Final = 3
"""Observations in a row in which too many calls wait in the engine: one may fall into the start of a batch."""
PEAKS: Final = 8
"""Observations whose largest number of running calls counts as what the engine runs at once."""
COOL_OBSERVATIONS: Final = 3
"""Observations after a cut in which neither another cut nor growth is made: its effect is not seen before."""


class WorkerLimit:
    """``start``: the first limit. ``floor`` and ``ceiling`` bound it. ``adaptive`` False: it stays ``ceiling``."""

    def __init__(self, *, start: int, floor: int, ceiling: int, adaptive: bool = True) -> None:
        self._floor, self._ceiling, self._adaptive = floor, ceiling, adaptive
        self._value = float(ceiling if not adaptive else min(max(start, floor), ceiling))
        self._slow_start = True
        self._cool = 0
        self._retracted: int | None = None
        self._crowded = 0
        self._peaks: deque[int] = deque(maxlen=PEAKS)

    @property
    def value(self) -> int:
        """Most calls that the worker is given now."""
        return int(self._value)

    def observe(self, load: EngineLoad, in_flight: int) -> None:
        """Adjusts the limit to what the engine says of itself, with ``in_flight`` calls of ours on it."""
        if not self._adaptive:
            return
        retracted = self._newly_retracted(load)
        self._peaks.append(load.running)
        peak = max(self._peaks)
        allowed = max(1, int(peak * QUEUE_SHARE))
        self._crowded = self._crowded + 1 if load.waiting > allowed else 0
        if self._cool:
            self._cool -= 1
        elif retracted or (load.waiting and load.kv_used is not None and load.kv_used >= KV_FULL):
            self._cut(CUT * max(peak, 1))
        elif self._crowded >= PATIENCE:
            self._slow_start = False
            self._set(min(self._value, peak + allowed))
        elif in_flight >= self.value and not load.waiting:
            self._set(self._value * 2 if self._slow_start else self._value + 1)

    def blind(self) -> None:
        """The engine does not say how busy it is: the limit stays the ceiling."""
        self._adaptive = False
        self._value = float(self._ceiling)

    def refused(self) -> None:
        """The engine refused a call because it has too many."""
        if self._adaptive and not self._cool:
            self._cut(CUT * self._value)

    def _cut(self, value: float) -> None:
        self._slow_start = False
        self._cool = COOL_OBSERVATIONS
        self._set(min(value, self._value))

    def _newly_retracted(self, load: EngineLoad) -> bool:
        before, self._retracted = self._retracted, load.retracted
        return before is not None and load.retracted is not None and load.retracted > before

    def _set(self, value: float) -> None:
        self._value = min(max(value, self._floor), self._ceiling)
