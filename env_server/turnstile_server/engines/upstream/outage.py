"""What all calls know together of a hosted server that does not answer. Pure: no clock, no task.

The first call that finds the server dead has tried for as long as the client libraries do (``engine.RETRIES``:
some 15 s where connections are refused). Without this each call of each rollout would try as long, and an agent's
own retries as often again. So from then on one call every ``PROBE_EVERY_S`` is let through, with one try, and the
others fail at once with the time until the next.

What must hold: a server that answers any call is up; one call's failure says nothing of a server that answered
another one meanwhile (it is only busy, or refuses that one).
"""

from __future__ import annotations

from typing import Final

PROBE_EVERY_S: Final = 5.0


class Outage:
    """Times are monotonic seconds."""

    def __init__(self) -> None:
        self._answered_at = float("-inf")
        self._down_since: float | None = None
        self._next_probe = 0.0
        self._said = ""

    @property
    def down(self) -> bool:
        """The server is known to be dead: a call that is let through is a probe."""
        return self._down_since is not None

    def answered(self, now: float) -> None:
        """The server said something to a call, be it a refusal."""
        self._answered_at, self._down_since = now, None

    def failed(self, began: float, now: float, said: str) -> None:
        """A call that began at ``began`` could not reach the server, or only a proxy that could not."""
        if self._answered_at >= began:
            return
        if self._down_since is None:
            self._down_since = began
            self._next_probe = now + PROBE_EVERY_S
        self._said = said

    def refusal(self, now: float) -> tuple[str, float] | None:
        """A sentence, and the seconds until the next try, for a call that is not let through; None: it is."""
        if self._down_since is None:
            return None
        if now >= self._next_probe:
            self._next_probe = now + PROBE_EVERY_S
            return None
        wait_s = self._next_probe - now
        return (
            f"the upstream has not answered for {now - self._down_since:.0f} s, so this call was not sent; it is "
            f"asked again within {PROBE_EVERY_S:.0f} s. The last try said: {self._said}",
            wait_s,
        )
