"""Which addresses a host may lead to, and how they are found.

What must hold: only public addresses, and those of ``egress.allow_addresses``; an address that carries another one
(IPv4 in IPv6, NAT64) is judged by the one that it leads to.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from typing import Any, Protocol

import anyio

from turnstile_server.threads import LoopCaller, result_of

Address = IPv4Address | IPv6Address
Network = IPv4Network | IPv6Network
_Found = tuple[Any, Any, int, str, Any]
"""One address as ``socket.getaddrinfo`` returns it."""

_NEVER: tuple[Network, ...] = tuple(
    map(
        ip_network,
        (
            # Services of a cloud to its machines, under a public address (Azure).
            "168.63.129.16/32",
            # What the standard library of some versions calls global: protocol assignments, benchmarks, relays.
            "192.0.0.0/24",
            "192.88.99.0/24",
            "198.18.0.0/15",
            # IPv6 that carries IPv4 to a place that only the carrier knows: compatible, 6to4, Teredo, local NAT64.
            "::/96",
            "2002::/16",
            "2001::/23",
            "64:ff9b:1::/48",
            # Site-local, and documentation of 2024.
            "fec0::/10",
            "3fff::/20",
            "5f00::/16",
        ),
    )
)
_NAT64 = IPv6Network("64:ff9b::/96")


class Resolver(Protocol):
    """Looks names up."""

    async def resolve(self, host: str, port: int) -> Sequence[Address]:
        """The addresses of a name, the best first. Raises OSError where there are none."""
        ...


class SystemResolver:
    """A ``Resolver``: the system's own. ``threads``: look-ups at once; each holds a thread until it ends, also
    where nobody waits for it any more."""

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._limiter: anyio.CapacityLimiter | None = None

    async def resolve(self, host: str, port: int) -> Sequence[Address]:
        if self._limiter is None:
            self._limiter = anyio.CapacityLimiter(self._threads)
        try:
            found = await result_of(await self._look_up(self._limiter, host, port))
        except UnicodeError as error:
            raise OSError(f"no name for a resolver: {error}") from error
        return list(dict.fromkeys(ip_address(str(entry[4][0])) for entry in found))

    async def _look_up(self, limiter: anyio.CapacityLimiter, host: str, port: int) -> Future[list[_Found]]:
        """A look-up that has begun. anyio's own threads would give their place back when the caller is cancelled,
        while the system still waits for a name server. Raises OSError."""
        place, loop, made = object(), LoopCaller(), Future[list[_Found]]()

        def work() -> None:
            try:
                made.set_result(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM))
            except Exception as error:  # noqa: BLE001 - whoever waits raises it
                made.set_exception(error)

        await limiter.acquire_on_behalf_of(place)
        made.add_done_callback(lambda _: loop.call(limiter.release_on_behalf_of, place))
        try:
            threading.Thread(target=work, name="resolver", daemon=True).start()
        except RuntimeError as error:  # no thread can be had
            made.set_exception(OSError(str(error)))
        return made


def plain(address: Address) -> Address:
    """IPv4 that is written as IPv6, as IPv4."""
    if isinstance(address, IPv6Address) and address.ipv4_mapped is not None:
        return address.ipv4_mapped
    return address


def allowed(address: Address, networks: Sequence[Network]) -> bool:
    """True if the proxy may connect to ``address``, which is ``plain``."""
    if isinstance(address, IPv6Address) and address.scope_id is not None:
        return False
    if within(address, networks):
        return True
    if within(address, _NEVER):
        return False
    if isinstance(address, IPv6Address) and address in _NAT64:
        return allowed(IPv4Address(address.packed[-4:]), networks)
    return address.is_global and not address.is_multicast and not address.is_reserved


def within(address: Address, networks: Sequence[Network]) -> bool:
    return any(address.version == network.version and address in network for network in networks)
