"""Connections over Unix sockets that may be cancelled at any time."""

from __future__ import annotations

from anyio.abc import SocketAttribute, SocketStream


async def over_transport(stream: SocketStream) -> SocketStream:
    """The connection of anyio's own stream over a Unix socket, which may not be used any more.

    That one (4.16.0) watches the socket itself: if a read or a write is cancelled in the same turn of the event
    loop in which the socket becomes ready, InvalidStateError is raised in the loop, where nobody can catch it.
    Asyncio's transports, over which anyio's TCP streams go, do not have this.
    """
    return await SocketStream.from_socket(stream.extra(SocketAttribute.raw_socket))
