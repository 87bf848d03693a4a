"""Counters of workers' ended lives, so that a sum over the workers never falls while the server runs.

A counter that falls is read as one that began again at zero: all that the other workers have counted would be
added once more. What must hold: each life of a worker counts once, as it was last told; what it counted after that
is lost with it. Gauges say what is now, and end with the life.
"""

from __future__ import annotations

from collections.abc import Collection

from turnstile_server.workers.merged_metrics import merged_counters


class KeptCounters:
    """Workers are numbers, and so are their lives."""

    def __init__(self) -> None:
        self._latest: dict[int, tuple[int, str]] = {}
        self._ended = ""
        """The counters of all ended lives but the latest of each worker."""

    def told(self, worker: int, life: int, exposition: str) -> None:
        before = self._latest.get(worker)
        if before is not None and before[0] != life:
            self._ended = merged_counters([self._ended, before[1]])
        self._latest[worker] = (life, exposition)

    def of_the_gone(self, present: Collection[int]) -> list[str]:
        """Counters of lives that have ended, as expositions. ``present``: workers that have just told theirs."""
        gone = [text for worker, (_, text) in self._latest.items() if worker not in present]
        return [each for each in (self._ended, merged_counters(gone)) if each]
