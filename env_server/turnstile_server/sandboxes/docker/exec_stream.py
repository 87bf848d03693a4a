"""The two-way stream of one command under the engine's exec: input in, output out in frames.

Owns the connection. ``pump`` blocks, in its caller's thread, until the command's output ends or ``cut`` is called
from another thread; the connection is closed afterwards in either case. Wire format: Docker Engine API,
"Attach to a container": a header of 8 bytes (which stream, how many bytes), then the payload.
"""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Callable
from typing import Any

_HEADER = struct.Struct(">BxxxL")
_CHUNK = 1 << 16
STDOUT, STDERR = 1, 2


class ExecStream:
    """``silence_s``: reading gives up after that long without a byte."""

    def __init__(self, exec_id: str, opened: Any, silence_s: float | None = None) -> None:
        self.exec_id = exec_id
        # The SDK gives the buffered file of a plain socket, or the socket itself where it is a TLS one.
        self._opened = opened
        self._socket: socket.socket = opened if isinstance(opened, socket.socket) else opened._sock
        self._socket.settimeout(silence_s)

    def pump(self, output: Callable[[int, bytes], None], stdin: bytes = b"") -> None:
        """Gives ``output`` each payload with STDOUT or STDERR. Raises OSError when the connection broke off."""
        feeder: threading.Thread | None = None
        if stdin:
            # Beside the reading: a command may write more than the connection holds before it reads on.
            feeder = threading.Thread(target=self._feed, args=(stdin,), name="sandbox-exec-stdin", daemon=True)
            feeder.start()
        try:
            while (header := self._take(_HEADER.size)) is not None:
                stream, left = _HEADER.unpack(header)
                while left:
                    chunk = self._socket.recv(min(left, _CHUNK))
                    if not chunk:
                        raise OSError("the engine broke the stream off")
                    output(stream, chunk)
                    left -= len(chunk)
        finally:
            self.cut()
            if feeder is not None:
                feeder.join()
            self._opened.close()

    def cut(self) -> None:
        """Ends the stream; the command is not ended by this."""
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            return  # it was closed already

    def _feed(self, data: bytes) -> None:
        try:
            self._socket.sendall(data)
            self._socket.shutdown(socket.SHUT_WR)
        except OSError:
            return  # the command ended without reading all of it

    def _take(self, size: int) -> bytes | None:
        taken = b""
        while len(taken) < size:
            chunk = self._socket.recv(size - len(taken))
            if not chunk:
                if taken:
                    raise OSError("the engine broke the stream off")
                return None
            taken += chunk
        return taken
