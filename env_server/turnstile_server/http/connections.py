"""The open connections of a listener: how many there are, who makes way for whom, and how long one may dawdle.

Holds: a connection that owes a request's head, or the rest of a body that was refused, is closed after its time;
so is one whose client takes no bytes. When no place is left, the oldest connection that serves nobody makes way
for a new one: it is idle, its request's head is not whole, or its request has not shown a key. After those come
connections whose request has shown its key, but is not whole. So connections that cost nothing to hold cannot keep
others out; a connection whose request is whole and being served is never cut for a new one. Time in which this
process did not run counts against no client: what it sent meanwhile was not read.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass

from starlette.types import Scope

from turnstile_server.http.body_parts import PartQueue
from turnstile_server.http.bounds import ListenerBounds
from turnstile_server.http.fair_share import FairShare
from turnstile_server.settings import BoundedSection

_LOG = logging.getLogger(__name__)
_EXTENSION = "turnstile.seat"
_LOG_EVERY_S = 60.0
_SERVES_NOBODY, _SENDS = 0, 1
"""The ranks of connections that make way."""
_SLOWEST_SWEEP_S = 1.0


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """Times in seconds. ``max_connections``: open at once."""

    max_connections: int = 1024
    head_timeout_s: float = 15.0
    send_timeout_s: float = 30.0
    body_stall_s: float = 5.0
    max_head_bytes: int = 64 << 10
    max_headers: int = 128

    @classmethod
    def of(cls, settings: BoundedSection, max_connections: int) -> ConnectionLimits:
        """``settings``: the section of a listener."""
        bounds = settings.bounds_of(ListenerBounds)
        return cls(
            max_connections,
            bounds.head_timeout_s,
            bounds.send_timeout_s,
            bounds.body_stall_s,
            bounds.max_head_bytes,
            bounds.max_headers,
        )


DEFAULT_LIMITS = ConnectionLimits()


class Connections:
    """The places for connections of one listener, or of many that share them.

    ``name``: whose connections they are, for the log. ``per_owner``: places of one owner, where owners are told
    apart (a sandbox is one); then no owner can take the places of all others.
    """

    def __init__(self, name: str, limits: ConnectionLimits, per_owner: int | None = None) -> None:
        self.limits = limits
        self.parts = PartQueue()
        """The queue by whose turns the input of connections is parsed."""
        self._name = name
        self._per_owner = per_owner
        self._share = FairShare(limits.max_connections)
        self._seats: set[Seat] = set()
        self._spare: tuple[dict[str, dict[Seat, None]], ...] = ({}, {})
        """Connections that make way, by rank and owner, the oldest first."""
        self._sweep: asyncio.TimerHandle | None = None
        self._sweep_due = 0.0
        self._logged_at = float("-inf")

    def __len__(self) -> int:
        return len(self._seats)

    def take(self, owner: str = "") -> Seat | None:
        """A place for a new connection; None where there is none."""
        if not self._has_room(owner) and not self._make_room(owner):
            self._log_full()
            return None
        self._share.take_anyway(owner)
        seat = Seat(self, owner)
        self._seats.add(seat)
        if self._sweep is None:
            self._plan_sweep()
        return seat

    def abort_all(self) -> None:
        for seat in list(self._seats):
            seat.abort()

    def rank(self, seat: Seat, rank: int | None) -> None:
        """When the connection makes way: the lowest rank first; None: never."""
        if seat in self._seats:
            for spare in self._spare:
                if seat in spare.get(seat.owner, {}):
                    del spare[seat.owner][seat]
                    if not spare[seat.owner]:
                        del spare[seat.owner]
            if rank is not None:
                self._spare[rank].setdefault(seat.owner, {})[seat] = None

    def release(self, seat: Seat) -> None:
        """The connection is closed. May be called twice."""
        if seat in self._seats:
            self.rank(seat, None)
            self._seats.remove(seat)
            self._share.give(seat.owner)

    def _has_room(self, owner: str) -> bool:
        held, left = self._share.held(owner), self._share.total - self._share.taken
        if self._per_owner is None:
            return left > 0
        return held < self._per_owner and left > held

    def _make_room(self, owner: str) -> bool:
        """Closes a connection that makes way: of the same owner, or of the one that holds most."""
        held = self._share.held
        full = self._per_owner is not None and held(owner) >= self._per_owner
        for spare in self._spare:
            giving = owner if owner in spare else max(spare, key=held, default=owner)
            if giving in spare and (giving == owner or (not full and held(giving) > held(owner))):
                next(iter(spare[giving])).abort()
                return True
        return False

    def _log_full(self) -> None:
        now = asyncio.get_running_loop().time()
        if now - self._logged_at > _LOG_EVERY_S:
            self._logged_at = now
            _LOG.warning("%s: all %d connections are busy; new ones are refused", self._name, len(self._seats))

    @property
    def _sweep_s(self) -> float:
        limits = self.limits
        return min(_SLOWEST_SWEEP_S, limits.head_timeout_s / 4, limits.send_timeout_s / 4, limits.body_stall_s / 4)

    def _plan_sweep(self) -> None:
        loop = asyncio.get_running_loop()
        self._sweep_due = loop.time() + self._sweep_s
        self._sweep = loop.call_at(self._sweep_due, self._swept)

    def _swept(self) -> None:
        # The event loop runs what is due before it reads. After a stall (SIGSTOP, a machine that was suspended or
        # far too busy) whole requests may wait unread on connections whose time seems to be over.
        now = asyncio.get_running_loop().time()
        late_s = max(0.0, now - self._sweep_due)
        for seat in list(self._seats):
            seat.check(now, late_s)
        self._sweep = None
        if self._seats:
            self._plan_sweep()


class Seat:
    """The place of one connection, and what its client owes. ``Connections`` makes it."""

    def __init__(self, connections: Connections, owner: str) -> None:
        self.owner = owner
        self.limits = connections.limits
        self.parts = connections.parts
        self._connections = connections
        self._transport: asyncio.Transport | None = None
        self._on_timeout: Callable[[], None] | None = None
        self.whole = False
        """The body of the request that is served has come."""
        self.blocked = False
        """Output waits: the client has not taken enough of what it was sent before."""
        self.closed = False
        """The connection is lost or was cut."""
        self._on_closed: Callable[[], None] | None = None
        self._admitted = False
        self._due: float | None = None
        self._owed = ""
        self._unsent = 0
        self._took_at: float | None = None
        """When the client last took bytes; None while it owes none."""

    def opened(self, transport: asyncio.Transport, on_timeout: Callable[[], None]) -> None:
        """``on_timeout`` ends the connection of a client that did not pay what it owed in time."""
        self._transport = transport
        self._on_timeout = on_timeout

    def owe(self, what: str, within_s: float | None) -> None:
        """Sets what the client owes the connection, and the time for it. The time runs on while ``what`` stays the
        same."""
        if what != self._owed:
            self._owed = what
            self._due = None if within_s is None else asyncio.get_running_loop().time() + within_s

    def request_began(self) -> None:
        """A request is served from now on, that has not shown its key."""
        self._admitted = self.whole = False
        self._connections.rank(self, _SERVES_NOBODY)

    def admit(self) -> None:
        """The request has shown its key."""
        self._admitted = True
        self._connections.rank(self, None if self.whole else _SENDS)

    def request_whole(self) -> None:
        """The request's body has come."""
        self.whole = True
        if self._admitted:
            self._connections.rank(self, None)

    def request_ended(self) -> None:
        """The connection serves nobody."""
        self._connections.rank(self, _SERVES_NOBODY)

    def keep(self) -> None:
        """The connection makes way for no other."""
        self._connections.rank(self, None)

    def took_bytes(self) -> None:
        self._took_at = None

    def check(self, now: float, late_s: float) -> None:
        """Closes the connection of a client that is too slow. ``late_s``: the time since the last check for which
        this process did not run."""
        transport = self._transport
        if transport is None:
            return
        if self._due is not None:
            self._due += late_s
        if self._took_at is not None:
            self._took_at += late_s
        if self._due is not None and now > self._due and self._on_timeout is not None:
            self._due = None
            self._on_timeout()
        unsent = transport.get_write_buffer_size()
        if unsent == 0 and not transport.is_closing():
            self._took_at = None
        elif self._took_at is None or 0 < unsent < self._unsent:
            self._took_at = now
        elif now - self._took_at > self.limits.send_timeout_s:
            transport.abort()
        self._unsent = unsent

    def abort(self) -> None:
        """Closes the connection at once, and frees its place."""
        if self._transport is not None:
            self._transport.abort()
        self.left()

    def left(self) -> None:
        """The connection is closed. May be called twice."""
        self.closed = True
        self._connections.release(self)
        tell, self._on_closed = self._on_closed, None
        if tell is not None:
            tell()

    def tell_when_closed(self, tell: Callable[[], None]) -> Callable[[], None]:
        """Calls ``tell`` once when the connection is lost, at once where it is; not after what is returned was
        called."""
        self._on_closed = tell
        if self.closed:
            self._on_closed = None
            tell()
        return self._tell_nobody

    def _tell_nobody(self) -> None:
        self._on_closed = None


def extensions_of(seat: Seat) -> dict[str, dict[object, object]]:
    """The ASGI extensions of a request on the connection, by which ``admit`` finds its place."""
    return {_EXTENSION: {"seat": seat}}


def seat_of(scope: Scope) -> Seat | None:
    """The place of the connection on which the request came; None behind a server that is not ours."""
    seat = scope.get("extensions", {}).get(_EXTENSION, {}).get("seat")
    return seat if isinstance(seat, Seat) else None


def admit(scope: Scope) -> None:
    """Notes that the request has shown its key: once it is whole, its connection makes way for no other."""
    seat = seat_of(scope)
    if seat is not None:
        seat.admit()
