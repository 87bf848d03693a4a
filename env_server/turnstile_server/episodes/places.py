"""The queue for places: which waiting episode is prepared next when one of ``episodes.max_running`` comes free.

A higher priority goes first, then the older group, then the earlier arrival. What must hold: a place is given to
one episode at a time, and is never lost, also where its episode stops at the moment in which it is given; a place
is only free while nobody waits; and nobody starves: of every ``oldest_every`` places that come free while episodes
wait, one goes to the episode that has waited longest.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import anyio
import anyio.lowlevel

from turnstile_server.settings import Settings


def beyond_places(settings: Settings) -> int:
    """Episodes that may be graded without a place among those that run; 0 where sandboxes have no room for both,
    because a grading that finds no sandbox in time gives no reward. A grading has two while it compares the work
    with the untouched task (``JudgedCopies.without_work``)."""
    most = settings.episodes.places
    return most if settings.sandboxes.places >= most + 2 * settings.grading.places else 0


@dataclass(frozen=True, slots=True)
class PlaceClaim:
    """An episode's claim to a place, which ranks it in the queue. ``group_since``: when its group's first episode
    came, monotonic seconds."""

    priority: int = 0
    group_since: float = 0.0


@dataclass(frozen=True, slots=True)
class _Waiter:
    claim: PlaceClaim
    arrival: int
    called: anyio.Event = field(default_factory=anyio.Event)

    @property
    def rank(self) -> tuple[int, float, int]:
        return (-self.claim.priority, self.claim.group_since, self.arrival)


class Places:
    """``count`` places. ``release`` each one that ``acquire`` gave, or ``leave`` it, and then ``end``.

    ``beyond``: so many episodes may go on without the place that they had, to be graded. Each holds a work, so an
    endless number would fill the memory where gradings are slower than agents.
    """

    def __init__(self, count: int, oldest_every: int, beyond: int = 0) -> None:
        self._free = count
        self._beyond = beyond
        self._oldest_every = oldest_every
        self._waiting: dict[int, _Waiter] = {}
        """By arrival, so in order of arrival."""
        self._arrivals = 0
        self._passed_over = 0
        """Places given in a row past the episode that waits longest."""

    @property
    def waiting(self) -> int:
        """Episodes in the queue."""
        return len(self._waiting)

    async def acquire(self, claim: PlaceClaim) -> None:
        """Returns with a place. A cancelled wait leaves the queue as if it had never come."""
        await anyio.lowlevel.checkpoint_if_cancelled()
        if self._free:  # then nobody waits
            self._free -= 1
            return
        waiter = _Waiter(claim, self._arrivals)
        self._arrivals += 1
        self._waiting[waiter.arrival] = waiter
        try:
            await waiter.called.wait()
        except BaseException:
            if waiter.called.is_set():
                self.release()
            else:
                del self._waiting[waiter.arrival]
            raise

    def release(self) -> None:
        """Gives the place to the next in the queue; with an empty one it is free."""
        if not self._waiting:
            self._free += 1
            return
        following = self._next()
        del self._waiting[following.arrival]
        following.called.set()

    def leave(self) -> bool:
        """Gives the place back before its episode ends; ``end`` says when it has. False: too many have left, so
        the episode keeps its place."""
        if self._beyond == 0:
            return False
        self._beyond -= 1
        self.release()
        return True

    def end(self) -> None:
        """An episode that has left its place has ended."""
        self._beyond += 1

    def _next(self) -> _Waiter:
        oldest = next(iter(self._waiting.values()))
        first = min(self._waiting.values(), key=lambda waiter: waiter.rank)
        if first is oldest or self._passed_over >= self._oldest_every - 1:
            self._passed_over = 0
            return oldest
        self._passed_over += 1
        return first
