"""TCP connections that are silent for as long as an agent thinks, and whose other machine may be gone
meanwhile."""

from __future__ import annotations

import socket
import sys
from typing import Final

_IDLE_S: Final = 30
_PROBE_S: Final = 10
_PROBES: Final = 6
"""tcp(7): silence before the first probe, time between probes, probes without an answer before the end."""


def keep_alive(connection: socket.socket) -> None:
    """A machine that is gone is noticed within a minute and a half."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if sys.platform == "linux":
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _IDLE_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _PROBE_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _PROBES)
