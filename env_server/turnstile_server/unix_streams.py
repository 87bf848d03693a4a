"""Listeners for sandboxes on Unix sockets, and connections over such sockets that may be cancelled at any time.

anyio's own (4.16.0) watch the socket themselves: if a read, a write or an ``accept`` is cancelled in the same turn
of the event loop in which the socket becomes ready, InvalidStateError is raised in the loop, where nobody can
catch it. Asyncio's transports, over which anyio's TCP streams go, and ``anyio.wait_readable`` do not have this.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, TypeAlias

import anyio
from anyio.abc import Listener, SocketAttribute, SocketListener, SocketStream, TaskGroup

ConnectionHandler: TypeAlias = Callable[[SocketStream], Coroutine[Any, Any, object]]


def bound_for_sandbox(path: Path) -> socket.socket:
    """A new Unix socket at ``path``, to which every user may connect; it does not listen yet. Raises OSError.

    A connection's server end belongs to the network name space of the client, and has the address by which it was
    bound: a sandbox reads that in its ``/proc/net/unix``. So it is bound below a descriptor of the folder, which
    tells nothing of this machine."""
    bound = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if sys.platform == "linux":
            folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                bound.bind(f"/proc/self/fd/{folder}/{path.name}")
            finally:
                os.close(folder)
        else:  # no sandbox shares this kernel
            bound.bind(str(path))
        os.chmod(path, 0o666)
        bound.setblocking(False)
    except OSError:
        bound.close()
        raise
    return bound


async def listener_for_sandbox(path: Path) -> Listener[SocketStream]:
    """A listener on a new ``bound_for_sandbox``. Raises OSError."""
    bound = bound_for_sandbox(path)
    try:
        bound.listen(socket.SOMAXCONN)
        return await SocketListener.from_socket(bound)
    except BaseException:
        bound.close()
        raise


async def over_transport(stream: SocketStream) -> SocketStream:
    """The connection of anyio's own stream over a Unix socket, which may not be used any more."""
    return await SocketStream.from_socket(stream.extra(SocketAttribute.raw_socket))


async def serve_unix(listener: Listener[SocketStream], handler: ConnectionHandler, tasks: TaskGroup) -> None:
    """As ``listener.serve``, for a ``listener_for_sandbox``: starts ``handler`` in ``tasks`` for
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
