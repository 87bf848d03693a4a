"""Measures whether a worker does better with all episodes at once, although its prefix cache does not hold them.
Pure.

Episodes that take turns leave the worker idle while they run their tools. All at once keep it busy, and cost a
prompt that is computed anew for each call: that pays where prompts are short or tools are slow, and is thrashing
where they are long. Which of the two it is depends on the model, the machine and the task, so it is measured:
tokens sampled per second by the episodes that take turns, then by all, for as many calls; the better way stays.

What bounds the gain: calls that run need their place in the cache, so no more can run at once than take turns.
Where these are in a call for a share ``s`` of their time (mean running calls over episodes, Little's law), all at
once bring at most ``1/s``, and above ``BUSY`` nothing is tried.
"""

from __future__ import annotations

from typing import Final

BUSY: Final = 0.8
BETTER: Final = 1.1
"""All at once must be so many times as fast to stay; rounds of the same differ by some per cent."""
SAMPLE: Final = 16
"""Calls at least that a way is measured by; else two of each episode that takes turns, or one of each of all."""
LEAST_S: Final = 2.0
"""Seconds at least of a measurement: calls end in bursts."""
FIRST_REST: Final = 32
MAX_REST: Final = 512
"""Measurements before the other way is tried again: from the first to the most, doubled when it was no better."""


class OpenTrial:
    """``open`` False: the episodes take turns. Times are monotonic seconds, counts are of one worker."""

    def __init__(self) -> None:
        self.open = False
        self.settled = True
        """True if the tokens that calls find in the cache were left by calls of the same way."""
        self._rest, self._next_rest = 1, FIRST_REST
        """Measurements of this way before the other is tried, and after it was."""
        self._held_rate = self._open_rate = 0.0
        """Tokens per second; of the latter the mean of the last ones, as one may fall between two bursts."""
        self._stayed = False
        self._running, self._episodes = 0, 0
        self._at: float | None = None
        self._waited = False
        self._skipped: int | None = 0
        """Calls since the way changed; None: enough, it is measured."""
        self._measure()

    def begins(self, now: float, episodes: int) -> None:
        """A call begins; ``episodes`` take turns then."""
        self._pass(now, episodes)
        self._running += 1

    def ends(self, now: float, episodes: int, sampled: int, crowded: bool) -> bool:
        """A call ends that sampled so many tokens (0: it failed). ``crowded``: the cache does not hold all that
        are there. Whether ``open`` has changed, or the cache has become as its way makes it."""
        self._pass(now, episodes)
        self._running -= 1
        if not sampled:
            return False
        if self._skipped is not None:
            self._skipped += 1
            if self._skipped < episodes:
                return False
            self._skipped, settles, self.settled = None, not self.settled, True
            self._measure()
            return settles
        self._calls += 1
        self._sampled += sampled
        if self._calls < SAMPLE or self._seconds < LEAST_S:
            return False
        rate = self._sampled / self._seconds
        worse = self.open and not self._stayed and rate < self._held_rate  # seen before all have had a call
        if self._calls < (episodes if self.open else 2 * episodes) and not worse:
            return False
        return self._judge(rate, crowded)

    def waits(self) -> None:
        """An episode had to wait for its turn."""
        self._waited = True

    def disturbed(self) -> None:
        """The worker stood still, or lost its cache: what was measured so far says nothing."""
        self._skipped = 0

    def _pass(self, now: float, episodes: int) -> None:
        if self._at is not None and self._episodes:
            passed = now - self._at
            self._seconds += passed
            self._in_calls += passed * self._running
            self._in_turns += passed * self._episodes
        self._at, self._episodes = now, episodes

    def _measure(self) -> None:
        self._calls = self._sampled = 0
        self._seconds = self._in_calls = self._in_turns = 0.0

    def _judge(self, rate: float, crowded: bool) -> bool:
        waited, busy = self._waited, self._in_calls > BUSY * self._in_turns
        self._waited = False
        self._measure()
        if self.open:
            return self._judge_open(rate, crowded)
        if not waited or busy:
            return False
        self._rest -= 1
        self._held_rate = rate
        return self._switch(True) if self._rest <= 0 else False

    def _judge_open(self, rate: float, crowded: bool) -> bool:
        if not crowded:  # all fit: there is nothing to choose
            self._rest = 1
            return self._switch(False)
        self._open_rate = (self._open_rate + rate) / 2 if self._stayed else rate
        if self._open_rate < (1.0 if self._stayed else BETTER) * self._held_rate:
            self._rest = self._next_rest
            return self._switch(False)
        if not self._stayed:
            self._stayed, self._rest = True, self._next_rest
        self._rest -= 1
        if self._rest:
            return False
        self._rest = 1  # taking turns is measured anew, once
        return self._switch(False)

    def _switch(self, open_: bool) -> bool:
        self.open, self.settled, self._stayed = open_, False, False
        self._skipped = -self._running  # those end first; then each episode has a call that fills the cache anew
        if not open_:
            self._next_rest = min(2 * self._next_rest, MAX_REST)
        return True
