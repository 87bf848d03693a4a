"""Leases: which episodes end because nobody owns them any more. A pure state machine, without a clock of its own.

A trainer that was killed cannot cancel its episodes; they would hold their places until a limit of time. So it may
create them with a lease, which it renews while it lives. Times are monotonic seconds, pushed in by the caller.

What must hold: a lease that is renewed in time never lapses, also where this server itself did not run for a
while; an episode without a lease is never touched; a lease that lapsed with open episodes is not taken up again,
so that an owner that was only stopped for a while learns of it; a lease without open episodes takes no memory, so
there are at most as many as open episodes.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from turnstile.models import Lease, LeaseState
from turnstile_server.errors import LeaseLapsed

_REMEMBERED = 1000
"""Lapsed leases whose owners still get an answer of their own."""
_STALL_S = 3.0
"""A look that comes this much later than it should shows that the server did not run, so no renewal was read."""


@dataclass(slots=True)
class _Held:
    lease_s: float
    deadline: float
    episodes: set[str] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class Lapse:
    """A lease that was not renewed in time."""

    error: LeaseLapsed
    episodes: frozenset[str]


class Leases:
    """``look_s``: how often ``lapsed`` is called."""

    def __init__(self, look_s: float, now: float) -> None:
        self._look_s = look_s
        self._looked = now
        self._held: dict[str, _Held] = {}
        self._lease_of: dict[str, str] = {}
        self._lapsed: OrderedDict[str, LeaseLapsed] = OrderedDict()

    def check(self, lease_id: str) -> None:
        """Raises LeaseLapsed for a lease that has."""
        if lease_id in self._lapsed:
            earlier = self._lapsed[lease_id]
            raise LeaseLapsed(earlier.message, detail=earlier.detail)

    def hold(self, lease: Lease, episode_id: str, now: float) -> None:
        """The episode is of this lease from now on, which is renewed. Where the lease lapsed while the episode was
        made, it lapses once more."""
        self._renewed(lease.lease_id, lease.lease_s, now).episodes.add(episode_id)
        self._lease_of[episode_id] = lease.lease_id

    def renew(self, lease_id: str, lease_s: float, now: float) -> LeaseState:
        """Raises LeaseLapsed. A lease that is not known has no open episodes: its first one may be to come, or its
        server may have been restarted."""
        self.check(lease_id)
        count = len(self._renewed(lease_id, lease_s, now).episodes) if lease_id in self._held else 0
        return LeaseState(lease_id=lease_id, lease_s=lease_s, open_episodes=count)

    def _renewed(self, lease_id: str, lease_s: float, now: float) -> _Held:
        held = self._held.setdefault(lease_id, _Held(lease_s, now))
        held.lease_s, held.deadline = lease_s, now + lease_s
        return held

    def ended(self, episode_id: str) -> None:
        lease_id = self._lease_of.pop(episode_id, None)
        held = None if lease_id is None else self._held.get(lease_id)
        if lease_id is not None and held is not None:
            held.episodes.discard(episode_id)
            if not held.episodes:
                del self._held[lease_id]

    def __len__(self) -> int:
        """Leases that are remembered: those with open episodes, and the latest that lapsed."""
        return len(self._held) + len(self._lapsed)

    def lapsed(self, now: float) -> list[Lapse]:
        """The leases that have lapsed since the last look, which are forgotten."""
        late = now - self._looked - self._look_s
        self._looked = now
        if late > _STALL_S:
            for held in self._held.values():
                held.deadline += late
        over = [lease_id for lease_id, held in self._held.items() if held.deadline < now]
        return [self._lapse(lease_id, self._held.pop(lease_id)) for lease_id in over]

    def _lapse(self, lease_id: str, held: _Held) -> Lapse:
        error = LeaseLapsed(
            f"nothing was heard of the owner of lease {lease_id} for {held.lease_s:g} s, so its open episodes "
            "were cancelled: it died, was stopped, or could not reach the server",
            detail={"lease_id": lease_id, "lease_s": held.lease_s},
        )
        self._lapsed[lease_id] = error
        while len(self._lapsed) > _REMEMBERED:
            self._lapsed.popitem(last=False)
        return Lapse(error, frozenset(held.episodes))
