"""Connects to a host of the allow-list, at an address that was checked.

What must hold: the connection goes to exactly the address that was checked; the name is not looked up again. An
address of this machine is refused also where it is public.
"""

from __future__ import annotations

from collections.abc import Sequence
from ipaddress import ip_address

import anyio
from anyio.abc import SocketAttribute, SocketStream

from turnstile.models.network import NetworkOutcome
from turnstile_server.egress.addresses import Address, Resolver, allowed, plain, within
from turnstile_server.egress.bounds import EgressBounds
from turnstile_server.egress.log import NetworkEntry
from turnstile_server.egress.proxy_target import ProxyTarget
from turnstile_server.egress.refusal import NetworkRefused
from turnstile_server.settings.egress import EgressSettings
from turnstile_server.settings.host_patterns import shown_host


class Dialer:
    def __init__(self, settings: EgressSettings, resolver: Resolver) -> None:
        self._settings = settings
        self._bounds = settings.bounds_of(EgressBounds)
        self._resolver = resolver

    async def dial(self, target: ProxyTarget, entry: NetworkEntry) -> SocketStream:
        """Connects, within ``connect_timeout_s`` of ``bounds``. Raises NetworkRefused."""
        try:
            with anyio.fail_after(self._bounds.connect_timeout_s):
                return await self._connected(target, await self._addresses(target, entry), entry)
        except TimeoutError:
            most = self._bounds.connect_timeout_s
            raise NetworkRefused(
                NetworkOutcome.UNREACHABLE, f"{target.host} did not answer within {most:g} s"
            ) from None

    async def _addresses(self, target: ProxyTarget, entry: NetworkEntry) -> Sequence[Address]:
        """The addresses at which the host may be reached: at least one. Raises NetworkRefused."""
        if target.by_address:
            found: Sequence[Address] = [ip_address(target.host)]
        else:
            try:
                found = await self._resolver.resolve(target.host, target.port)
            except OSError as error:
                raise NetworkRefused(
                    NetworkOutcome.UNRESOLVED, f"{target.host} could not be looked up: {error}"
                ) from error
        addresses = [plain(address) for address in found]
        fine = [address for address in addresses if allowed(address, self._settings.allow_addresses)]
        if not fine and addresses:
            entry.address = str(addresses[0])
            raise self._private(target, addresses[0])
        if not fine:
            raise NetworkRefused(NetworkOutcome.UNRESOLVED, f"{target.host} has no address")
        return fine

    async def _connected(
        self, target: ProxyTarget, addresses: Sequence[Address], entry: NetworkEntry
    ) -> SocketStream:
        failure: OSError | None = None
        for address in addresses:
            entry.address = str(address)
            try:
                stream = await anyio.connect_tcp(str(address), target.port)
            except OSError as error:
                failure = error
                continue
            if stream.extra(SocketAttribute.local_address)[0] == str(address) and not within(
                address, self._settings.allow_addresses
            ):
                await anyio.aclose_forcefully(stream)
                raise self._private(target, address)
            return stream
        reason = "" if failure is None else f": {failure.__cause__ or failure}"
        raise NetworkRefused(
            NetworkOutcome.UNREACHABLE, f"{shown_host(target.host)}:{target.port} cannot be reached{reason}"
        ) from failure

    def _private(self, target: ProxyTarget, address: Address) -> NetworkRefused:
        return NetworkRefused(
            NetworkOutcome.ADDRESS,
            f"{target.host} leads to {address}, which is no public address (egress.allow_addresses)",
        )
