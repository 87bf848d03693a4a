"""Which of the waiting calls goes next. Pure: no clock of its own, no tasks.

The order: a higher priority first. Within a priority the group with the fewest calls on the engines, so that no
group is starved by another one's many; among equals the older group, so that groups are finished in the order in
which they began; then the call that came first. A call that has waited for ``starving_s`` goes before all others:
a stream of calls with a higher priority cannot hold it back for ever.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from turnstile_server.engines.protocol import CallOrigin


@dataclass(slots=True, eq=False)
class Ticket:
    """A call that waits, or is on a worker. ``since``: when it first came (monotonic seconds)."""

    origin: CallOrigin
    since: float
    admitted: Callable[[], None]
    """Called when ``worker`` is set."""
    tokens: int = 0
    """Tokens of its prompt."""
    queued_at: float = 0.0
    """When it began to wait this time."""
    worker: str | None = None
    """The worker that it is on; None while it waits."""
    group: str = field(init=False)
    """Calls without a group count by their episode."""

    def __post_init__(self) -> None:
        self.group = self.origin.group or self.origin.episode_id


class CallQueue:
    """The waiting calls, and how many calls of each group run."""

    def __init__(self, starving_s: float) -> None:
        self._starving_s = starving_s
        self.waiting: dict[Ticket, None] = {}
        self._running: Counter[str] = Counter()

    def __len__(self) -> int:
        """Waiting calls."""
        return len(self.waiting)

    def add(self, ticket: Ticket) -> None:
        self.waiting[ticket] = None

    def remove(self, ticket: Ticket) -> None:
        """The call no longer waits; no-op for one that did not."""
        self.waiting.pop(ticket, None)

    def admit(self, ticket: Ticket, worker: str) -> None:
        """Takes the call out of the queue: it goes to ``worker``."""
        del self.waiting[ticket]
        self._running[ticket.group] += 1
        ticket.worker = worker
        ticket.admitted()

    def ended(self, ticket: Ticket) -> None:
        """An admitted call is over."""
        self._running[ticket.group] -= 1
        if not self._running[ticket.group]:
            del self._running[ticket.group]
        ticket.worker = None

    def in_order(self, now: float) -> list[Ticket]:
        """The waiting calls, the next one first, as things stand now."""

        def rank(ticket: Ticket) -> tuple[bool, int, int, float, float]:
            starving = now - ticket.since >= self._starving_s
            origin = ticket.origin
            fair = self._running[ticket.group]
            return (not starving, -origin.priority, fair, origin.group_since, ticket.since)

        return sorted(self.waiting, key=rank)
