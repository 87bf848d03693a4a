"""The two-way stream of one command under the engine's exec: input in, output out in frames.

Owns the connection. ``pump`` blocks, in its caller's thread, until the command's output ends or ``cut`` is called
from another thread; the connection is closed afterwards in either case. Wire format: Docker Engine API,
"Attach to a container": a header of 8 bytes (which stream, how many bytes), then the payload.
"""

from __future__ import annotations

import socket
import ssl
import struct
import threading
from collections.abc import Callable

from turnstile_server.sandboxes.docker.address import EngineAddress
from turnstile_server.sandboxes.docker.upgrade import UpgradeRequest

_HEADER = struct.Struct(">BxxxL")
_CHUNK = 1 << 16
STDOUT, STDERR = 1, 2


class ExecStream:
    """``first``: what has come already. ``silence_s``: reading gives up after that long without a byte."""

    def __init__(
        self, exec_id: str, connection: socket.socket, first: bytes = b"", silence_s: float | None = None
    ) -> None:
        self.exec_id = exec_id
        self._socket = connection
        self._socket.settimeout(silence_s)
        self._first = first

    @classmethod
    def open(
        cls, address: EngineAddress, exec_id: str, timeout_s: float, silence_s: float | None = None
    ) -> ExecStream:
        """Starts a command that the engine has made. Blocks. Raises OSError, SandboxUnavailable."""
        request = UpgradeRequest(f"/exec/{exec_id}/start", b'{"Detach": false, "Tty": false}')
        connection = address.connect_blocking(timeout_s)
        try:
            connection.sendall(request.to_send)
            first: bytes | None = None
            while first is None:
                first = request.feed(connection.recv(_CHUNK))
        except BaseException:
            connection.close()
            raise
        return cls(exec_id, connection, first, silence_s)

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
                    chunk = self._receive(min(left, _CHUNK))
                    if not chunk:
                        raise OSError("the engine broke the stream off")
                    output(stream, chunk)
                    left -= len(chunk)
        finally:
            self.cut()
            if feeder is not None:
                feeder.join()
            self._socket.close()

    def cut(self) -> None:
        """Ends the stream; the command is not ended by this."""
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            return  # it was closed already

    def _feed(self, data: bytes) -> None:
        try:
            self._socket.sendall(data)
            # TLS has no half of a connection to close: there the command is told how much comes (exec_process.py).
            if not isinstance(self._socket, ssl.SSLSocket):
                self._socket.shutdown(socket.SHUT_WR)
        except OSError:
            return  # the command ended without reading all of it

    def _receive(self, most: int) -> bytes:
        if self._first:
            chunk, self._first = self._first[:most], self._first[most:]
            return chunk
        return self._socket.recv(most)

    def _take(self, size: int) -> bytes | None:
        taken = b""
        while len(taken) < size:
            chunk = self._receive(size - len(taken))
            if not chunk:
                if taken:
                    raise OSError("the engine broke the stream off")
                return None
            taken += chunk
        return taken
