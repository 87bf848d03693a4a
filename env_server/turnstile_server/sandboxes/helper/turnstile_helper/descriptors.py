"""Messages that bring open descriptors with them (SCM_RIGHTS of unix(7))."""

from __future__ import annotations

import array
import os
import socket
from typing import List, Tuple  # noqa: UP035 - Python 3.8

_SIZE = array.array("i").itemsize


def receive(end: socket.socket, most_bytes: int, most_fds: int) -> Tuple[bytes, List[int], bool]:  # noqa: UP006
    """Words, descriptors, which no command inherits, and whether all of them came. Raises OSError.

    The caller owns the descriptors, also of a message that it refuses.
    """
    words, ancillary, flags, _ = end.recvmsg(most_bytes, socket.CMSG_SPACE(most_fds * _SIZE))
    fds = array.array("i")
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(data[: len(data) - len(data) % _SIZE])
    for fd in fds:
        os.set_inheritable(fd, False)
    return words, list(fds), not flags & socket.MSG_CTRUNC
