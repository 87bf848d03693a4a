"""Requests that show a wrong key: counted, told, and answered later and later to the peer that goes on guessing.

What must hold: a request with the right key is never looked at here, so nobody who has one waits for another's
guesses, whatever address they share (behind a reverse proxy all clients have the proxy's). A waiting answer holds
a timer and its connection, which makes way for any other; ``MOST_WAITING`` wait at once, further answers leave at
once. What is remembered is bounded: ``MOST_PEERS`` addresses, and behind those everybody else as one peer, so
that many addresses push none out. The delay slows a guesser down; no key can be guessed because of its length.
"""

from __future__ import annotations

import ipaddress
import logging
import time
from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import Final, Literal

from anyio import sleep
from starlette.types import Scope

from turnstile_server.http.connections import seat_of

_LOG = logging.getLogger(__name__)

Surface = Literal["control", "viewer", "model", "tools"]
"""Where the key was shown: control API, viewer, model API, an episode's MCP endpoint."""

FREE: Final = 3
"""Wrong keys of one peer that are answered at once: a key that was mistyped, or of the server before."""
FIRST_DELAY_S: Final = 0.25
MOST_DELAY_S: Final = 2.0
"""Below a shutdown's grace, and below the time-outs of clients, for which a slow 401 must stay a 401."""
FORGET_S: Final = 300.0
"""After so long without a wrong key a peer begins anew."""
MOST_PEERS: Final = 1024
MOST_WAITING: Final = 64
TELL_EVERY_S: Final = 60.0
_OTHERS: Final = "others"
_SANDBOX: Final = "a sandbox"
_SITE_BITS: Final = 64
"""Of an IPv6 address: one household or machine has them all."""


class GuessingPeers:
    """The delay of each peer's next answer. Pure: ``now`` is a monotonic time, which does not fall."""

    def __init__(self) -> None:
        self._peers: OrderedDict[str, tuple[int, float]] = OrderedDict()
        """Wrong keys, and the time of the last one; the peer that was quiet for longest first."""

    def __len__(self) -> int:
        return len(self._peers)

    def delay_s(self, peer: str, now: float) -> float:
        """Seconds to wait with the answer to a wrong key that came at ``now``."""
        while self._peers and next(iter(self._peers.values()))[1] < now - FORGET_S:
            self._peers.popitem(last=False)
        if peer not in self._peers and len(self._peers) >= MOST_PEERS:
            peer = _OTHERS
        count = self._peers.get(peer, (0, now))[0] + 1
        self._peers[peer] = count, now
        self._peers.move_to_end(peer)
        doublings = min(count - FREE - 1, 16)
        return 0.0 if doublings < 0 else min(FIRST_DELAY_S * 2.0**doublings, MOST_DELAY_S)


class WrongKeys:
    """Those of one server. ``count`` is called for each, ``tell`` with a sentence and the counts since the last
    one, at most every ``TELL_EVERY_S``. Used in the event loop."""

    def __init__(
        self,
        count: Callable[[Surface], None] | None = None,
        tell: Callable[[str, dict[str, int]], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._count = count
        self._tell = tell
        self._clock = clock
        self._peers = GuessingPeers()
        self._waiting = 0
        self._untold: Counter[str] = Counter()
        self._told_at = float("-inf")

    async def slow(self, surface: Surface, scope: Scope) -> None:
        """Returns when the request's refusal may leave."""
        peer, now = peer_of(scope), self._clock()
        if self._count is not None:
            self._count(surface)
        self._note(surface, peer, now)
        delay_s = self._peers.delay_s(peer, now)
        if not delay_s or self._waiting >= MOST_WAITING:
            return
        self._waiting += 1
        try:
            await sleep(delay_s)
        finally:
            self._waiting -= 1

    def _note(self, surface: Surface, peer: str, now: float) -> None:
        self._untold[surface] += 1
        if now - self._told_at < TELL_EVERY_S:
            return
        counts = dict(self._untold)
        where = ", ".join(f"{count} at {name}" for name, count in sorted(counts.items()))
        last = _SANDBOX if peer.startswith(_SANDBOX) else peer
        message = f"requests with a wrong key: {where}; the last one from {last}"
        self._untold.clear()
        self._told_at = now
        _LOG.warning("%s", message)
        if self._tell is not None:
            self._tell(message, counts)


def peer_of(scope: Scope) -> str:
    """The peer of a request: a sandbox, an IPv4 address, or the 64 first bits of an IPv6 address. What a client
    says of itself in ``X-Forwarded-For`` does not count: a guesser would be another one each time."""
    seat = seat_of(scope)
    if seat is not None and seat.owner:
        return seat.owner
    client = scope.get("client")
    host = str(client[0]) if client else ""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return "a local socket"
    if isinstance(address, ipaddress.IPv4Address):
        return str(address)
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(ipaddress.ip_network((address, _SITE_BITS), strict=False))
