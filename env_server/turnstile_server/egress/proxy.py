"""The proxy's listeners: one Unix socket for each sandbox that may reach hosts.

What must hold: a sandbox reaches only its own listener, so the socket says whose traffic it is; without an
``admit`` nothing is served; ``admit`` and the end of ``serve`` cut every connection that was made before.
"""

from __future__ import annotations

import logging
import resource
import sys
from pathlib import Path

import anyio
from anyio.abc import Listener, SocketStream

from turnstile.models.network import NetworkOutcome
from turnstile_server.egress.addresses import Resolver, SystemResolver
from turnstile_server.egress.bounds import EgressBounds
from turnstile_server.egress.budget import EgressStats, NetworkBudget
from turnstile_server.egress.connection import NetworkAccess, ProxyConnection
from turnstile_server.egress.dialer import Dialer
from turnstile_server.egress.log import NetworkLog
from turnstile_server.egress.refusal import NetworkRefused
from turnstile_server.settings.egress import EgressSettings
from turnstile_server.shortages import is_shortage
from turnstile_server.unix_streams import listener_for_sandbox, serve_unix

_LOG = logging.getLogger(__name__)
_SHORTAGE_S = 0.2
"""Pause where the process has no descriptor for another connection."""
_CLOSED = b"turnstile: the network of this sandbox is closed now\n"
_CLOSED_RESPONSE = (
    b"HTTP/1.1 403 Refused by the network policy\r\ncontent-type: text/plain\r\nconnection: close\r\n"
    b"x-turnstile-network: ended\r\ncontent-length: %d\r\n\r\n%s" % (len(_CLOSED), _CLOSED)
)


class EgressProxy:
    """Opens listeners, and holds what they share. ``resolver`` None: the system's."""

    def __init__(self, settings: EgressSettings, resolver: Resolver | None = None) -> None:
        self.settings = settings
        self.stats = EgressStats()
        self._dialer = Dialer(
            settings, resolver or SystemResolver(settings.bounds_of(EgressBounds).resolver_threads)
        )

    async def listen(self, path: Path) -> EgressListener:
        """Listens on a new Unix socket, to which any user may connect: the folder above guards it. Raises
        OSError."""
        return EgressListener(await listener_for_sandbox(path), self)

    def budget(self) -> NetworkBudget:
        """A new sandbox's."""
        return NetworkBudget(self.settings, self.stats)

    def log(self) -> NetworkLog:
        """For a sandbox that is no episode's."""
        return NetworkLog(0)

    async def serve(self, client: SocketStream, access: NetworkAccess, open_here: int) -> None:
        """One connection of a listener that has ``open_here`` of them, this one included."""
        connection = ProxyConnection(client, access, self._dialer, self.settings, self.stats)
        if open_here > self.settings.max_open:
            bound = f"{self.settings.max_open} connections of this sandbox are open (egress.max_open)"
            await connection.refuse(NetworkRefused(NetworkOutcome.CONNECTIONS, bound), counts=True)
        elif self.stats.open >= min(self.settings.max_open_total, _share()):
            bound = "all of the server's connections are in use (egress.max_open_total); try again"
            # Others hold them, so it costs this sandbox nothing.
            await connection.refuse(NetworkRefused(NetworkOutcome.CONNECTIONS, bound), counts=False)
        else:
            await connection.serve()


def _share() -> int:
    """Connections that an eighth of the process's descriptors allows: each takes two."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return max(1, limit // 16) if limit != resource.RLIM_INFINITY else sys.maxsize


class EgressListener:
    """One sandbox's. Run ``serve``; cancelling it closes the socket and every connection."""

    def __init__(self, listener: Listener[SocketStream], proxy: EgressProxy) -> None:
        self._listener = listener
        self._proxy = proxy
        self._access: NetworkAccess | None = None
        self._open: set[anyio.CancelScope] = set()

    def admit(self, access: NetworkAccess | None) -> None:
        """From now on this is allowed; None: nothing."""
        self._access = access
        for scope in self._open:
            scope.cancel()

    async def serve(self) -> None:
        """Until it is cancelled."""
        try:
            async with anyio.create_task_group() as connections:
                while True:
                    try:
                        await serve_unix(self._listener, self._answer, connections)
                    except anyio.BrokenResourceError as error:
                        if error.__cause__ is None or not is_shortage(error.__cause__):
                            raise
                    await anyio.sleep(_SHORTAGE_S)
        finally:
            with anyio.CancelScope(shield=True):
                await self._listener.aclose()

    async def _answer(self, client: SocketStream) -> None:
        scope = anyio.CancelScope()
        self._open.add(scope)
        try:
            with scope:
                access = self._access
                if access is None:
                    await client.send(_CLOSED_RESPONSE)
                else:
                    await self._proxy.serve(client, access, len(self._open))
                await client.aclose()
        except (anyio.BrokenResourceError, anyio.ClosedResourceError, OSError):
            pass  # the client left
        except Exception:  # noqa: BLE001 - the boundary to one connection: logged, and the others go on
            _LOG.exception("a connection of a sandbox's network failed")
        finally:
            self._open.discard(scope)
            with anyio.CancelScope(shield=True):
                await anyio.aclose_forcefully(client)
