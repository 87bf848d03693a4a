"""Connections over Unix sockets that may be cancelled at any time.

anyio's own (4.16.0) watch the socket themselves: if a read, a write or an ``accept`` is cancelled in the same turn
of the event loop in which the socket becomes ready, InvalidStateError is raised in the loop, where nobody can
catch it. Asyncio's transports, over which anyio's TCP streams go, and ``anyio.wait_readable`` do not have this.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any, TypeAlias

import anyio
from anyio.abc import Listener, SocketAttribute, SocketStream, TaskGroup

ConnectionHandler: TypeAlias = Callable[[SocketStream], Coroutine[Any, Any, object]]


async def over_transport(stream: SocketStream) -> SocketStream:
    """The connection of anyio's own stream over a Unix socket, which may not be used any more."""
    return await SocketStream.from_socket(stream.extra(SocketAttribute.raw_socket))


async def serve_unix(listener: Listener[SocketStream], handler: ConnectionHandler, tasks: TaskGroup) -> None:
    """As ``listener.serve``, for a listener of ``anyio.create_unix_listener``: starts ``handler`` in ``tasks`` for
    each connection, until it is cancelled. Raises BrokenResourceError where none can be taken any more."""
    waiting = listener.extra(SocketAttribute.raw_socket)
    while True:
        await anyio.wait_readable(waiting)
        try:
            connection, _ = waiting.accept()
        except BlockingIOError:  # it has gone
            continue
        except OSError as error:
            raise anyio.BrokenResourceError from error
        connection.setblocking(False)
        try:
            stream = await SocketStream.from_socket(connection)
        except BaseException:
            connection.close()
            raise
        tasks.start_soon(handler, stream)
