"""The bodies that one listener receives: how many bytes are held, and how fast they must come.

Holds: the bytes of a body are reserved before they are read, by its declared length or as they come; a body that
stops coming is refused within two windows of ``body_stall_s``, and any body after ``body_timeout_s``; what a
request reserved is free again when the request has ended, however it ends. Where no room is left, a body that
still comes, of the owner that holds most, gives way to an owner that holds less. Time in which this process did
not run counts against no body: what was sent meanwhile was not read.
"""

from __future__ import annotations

from asyncio import get_running_loop
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

import anyio
from starlette.types import Message, Receive

from turnstile_server.errors import BodyTooLarge, RequestTimeout, TooManyBytes
from turnstile_server.http.bounds import ListenerBounds
from turnstile_server.http.fair_share import FairShare

_RETRY_AFTER_S = 1.0
_LOOK_S = 0.5
"""Longest wait for more of a body until the clock is looked at."""
_STALL_S = 0.25
"""A look that comes this much later than it should shows that this process did not run."""


class IntakeLimits(Protocol):
    """What a listener's section says of all bodies together."""

    @property
    def max_body_bytes_total(self) -> int: ...

    def bounds_of(self, part: type[ListenerBounds], /) -> ListenerBounds: ...


class BodyLimits(Protocol):
    """What a section says of one body."""

    @property
    def max_body_bytes(self) -> int: ...

    def bounds_of(self, part: type[ListenerBounds], /) -> ListenerBounds: ...


class Intake:
    """Shares out the bytes of bodies. ``section``: of the settings; errors name it.

    ``per_owner``: bytes that one owner may hold, where owners are told apart (an episode is one).
    """

    def __init__(self, section: str, limits: IntakeLimits, per_owner: int | None = None) -> None:
        self.section = section
        self.bounds = limits.bounds_of(ListenerBounds)
        self._per_owner = per_owner
        self._shares = FairShare(limits.max_body_bytes_total)
        self._coming: dict[str, list[Reservation]] = {}
        """Bodies that are not whole yet, by owner."""

    @contextmanager
    def reserving(self, owner: str, declared: int, section: str) -> Iterator[Reservation]:
        """Room for one body, for the length of the block. As ``reserve``."""
        reservation = self.reserve(owner, declared, section)
        try:
            yield reservation
        finally:
            self.give_back(reservation)

    def reserve(self, owner: str, declared: int, section: str) -> Reservation:
        """Room for one body, until it is given back. ``declared``: its length, 0 where that is not known.

        ``section``: of the settings of what the body is sent to. Raises TooManyBytes.
        """
        reservation = Reservation(self, owner, section)
        if declared:
            reservation.hold(declared)
        self._coming.setdefault(owner, []).append(reservation)
        return reservation

    def give_back(self, reservation: Reservation) -> None:
        """The request has ended. Once for each that was made."""
        if not reservation.settled:
            self.arrived(reservation)
        if reservation.size:
            self._shares.give(reservation.owner, reservation.size)

    def take(self, owner: str, amount: int) -> None:
        """Raises TooManyBytes, with nothing taken."""
        held, most = self._shares.held(owner), self._per_owner
        if most is not None and held and held + amount > most:
            raise TooManyBytes(
                f"the episode's other requests hold {held} bytes of bodies, and {amount} more are above its limit "
                f"({self.section}.max_body_bytes_per_episode); wait for one of them, then send this again",
                retry_after_s=_RETRY_AFTER_S,
            )
        if self._shares.take(owner, amount):
            return
        missing = held + 2 * amount + self._shares.taken - self._shares.total - 1  # until ``take`` would do
        while missing > 0 and (gone := self.push_out(self._shares.held, held + amount)) is not None:
            missing -= gone.size
        if missing > 0:
            raise TooManyBytes(
                f"the server holds {self._shares.taken} bytes of bodies, and {amount} more are above this "
                f"caller's share ({self.section}.max_body_bytes_total); try again",
                retry_after_s=_RETRY_AFTER_S,
            )
        self._shares.take_anyway(owner, amount)

    def push_out(
        self, held: Callable[[str], int], more_than: int, section: str | None = None
    ) -> Reservation | None:
        """Refuses a body that still comes, of the owner that holds most, if that is ``more_than``.

        None where there is no such body. ``held``: how much an owner holds. ``section``: only bodies sent there.
        """
        greedy = max(self._coming, key=held, default=None)
        if greedy is None or held(greedy) <= more_than:
            return None
        for reservation in reversed(self._coming[greedy]):
            if section in (None, reservation.section):
                reservation.revoke()
                self.arrived(reservation)
                return reservation
        return None

    def arrived(self, reservation: Reservation) -> None:
        """The body is whole, or will not be: it can give way to no other."""
        reservation.settled = True
        coming = self._coming.get(reservation.owner, [])
        if reservation in coming:
            coming.remove(reservation)
            if not coming:
                del self._coming[reservation.owner]


class Reservation:
    """The bytes that one request has reserved. ``size``: in bytes. ``section``: the section of the settings of
    what it is sent to."""

    def __init__(self, intake: Intake, owner: str, section: str) -> None:
        self.size = 0
        self.owner = owner
        self.section = section
        self.settled = False
        """It gives way to no other any more."""
        self.waiting: anyio.CancelScope | None = None
        """Around the wait for more of the body."""
        self._intake = intake
        self._revoked = False

    def hold(self, size: int) -> None:
        """Reserves ``size`` bytes in all. Raises TooManyBytes."""
        if size > self.size:
            self._intake.take(self.owner, size - self.size)
            self.size = size

    def revoke(self) -> None:
        """The body gives way to another: ``check`` raises from now on."""
        self._revoked = True
        if self.waiting is not None:
            self.waiting.cancel()

    def check(self) -> None:
        """Raises TooManyBytes."""
        if self._revoked:
            raise TooManyBytes(
                "the server has no room left, and of all bodies that still come this one's episode holds most; "
                "try again, with fewer requests at once",
                retry_after_s=_RETRY_AFTER_S,
            )

    def arrived(self) -> None:
        """The body is whole."""
        self._intake.arrived(self)


class BodyReader:
    """Reads a body in the server's parts, within the limits of ``intake`` and ``limits``.

    ``section``: of the settings that ``limits`` come from; errors name it. ``arrived``: whether all of the body is
    there, so that nothing is waited for.
    """

    def __init__(
        self,
        receive: Receive,
        reservation: Reservation,
        intake: Intake,
        limits: BodyLimits,
        section: str,
        arrived: Callable[[], bool] = lambda: False,
    ) -> None:
        self._receive = receive
        self._arrived = arrived
        self._reservation = reservation
        self._intake = intake.bounds
        self._limits = limits
        self._timeout_s = limits.bounds_of(ListenerBounds).body_timeout_s
        self._section = section
        self._received = 0
        self._ends_at = get_running_loop().time() + self._timeout_s
        self._look_due = get_running_loop().time()
        self._window_ends_at = 0.0
        self._wanted = 0
        self._open_window()

    async def next(self) -> Message:
        """The next ASGI message. Raises BodyTooLarge, RequestTimeout, TooManyBytes."""
        message: Message | None = None
        if self._arrived():
            message = await self._receive()
            self._reservation.check()
        while message is None:
            now = self._looked()
            left_s = min(self._ends_at, self._window_ends_at) - now
            if left_s <= 0:
                raise self._too_slow()
            self._look_due = now + min(left_s, _LOOK_S)
            with anyio.move_on_after(self._look_due - now) as waiting:
                self._reservation.waiting = waiting
                message = await self._receive()
            self._reservation.check()
        self._look_due = self._looked()
        self._note(message)
        return message

    async def rest(self, take: Callable[[Message], bool]) -> None:
        """Hands the messages to ``take`` as ``next`` would give them, until it says that no other is wanted.

        One wait is set up for all that comes before the clock is looked at again: a long body comes in many parts.
        Raises as ``next`` does, and what ``take`` raises.
        """
        if self._arrived():
            wanted = True
            while wanted and self._arrived():
                wanted = take(await self.next())
            if not wanted:
                return
        while True:
            now = self._looked()
            left_s = min(self._ends_at, self._window_ends_at) - now
            if left_s <= 0:
                raise self._too_slow()
            self._look_due = now + min(left_s, _LOOK_S)
            with anyio.move_on_after(self._look_due - now) as waiting:
                self._reservation.waiting = waiting
                # What is there at once is taken without a wait: no cancellation could interrupt it.
                while anyio.current_time() < self._look_due:
                    message = await self._receive()
                    self._reservation.check()
                    self._note(message)
                    if not take(message):
                        self._look_due = self._looked()
                        return
            self._reservation.check()

    def _note(self, message: Message) -> None:
        if message["type"] == "http.request":
            self._count(len(message.get("body", b"")))
            if not message.get("more_body", False):
                self._reservation.arrived()

    def _count(self, size: int) -> None:
        self._received += size
        self._wanted -= size
        if self._received > self._limits.max_body_bytes:
            raise too_large(self._limits, self._section)
        self._reservation.hold(self._received)
        if self._wanted <= 0:
            self._open_window()

    def _looked(self) -> float:
        """The time. The event loop runs what is due before it reads, so after a stall (SIGSTOP, a machine that was
        suspended or far too busy) a body whose time seems to be over may wait unread: it gets that time back."""
        now = get_running_loop().time()
        late_s = now - self._look_due
        if late_s > _STALL_S:
            self._ends_at = max(self._ends_at + late_s, now + _LOOK_S)
            self._window_ends_at = max(self._window_ends_at + late_s, now + _LOOK_S)
        return now

    def _open_window(self) -> None:
        self._window_ends_at = get_running_loop().time() + self._intake.body_stall_s
        self._wanted = int(self._intake.body_stall_s * self._intake.min_body_rate)

    def _too_slow(self) -> RequestTimeout:
        if self._ends_at <= self._window_ends_at:
            return RequestTimeout(f"the body did not arrive within {self._timeout_s:g} s")
        window_s, rate = self._intake.body_stall_s, self._intake.min_body_rate
        return RequestTimeout(f"the body came too slowly: in {window_s:g} s fewer than {rate} bytes a second")


def too_large(limits: BodyLimits, section: str) -> BodyTooLarge:
    return BodyTooLarge(f"the body is larger than {limits.max_body_bytes} bytes ({section}.max_body_bytes)")
