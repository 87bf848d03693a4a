"""A container's standard input and output as one stream: how its helper is spoken to where no file system is
shared.

Owns the connection. Attached before the container is started, so that nothing is missed. Wire format: Docker
Engine API, "Attach to a container": the HTTP connection is upgraded; what is sent is standard input, what comes
has a header of 8 bytes (which stream, how many bytes) before each payload. Of standard error the end is kept, for
the sentence that says why a helper did not start.
"""

from __future__ import annotations

import ssl
import struct
from urllib.parse import quote

import anyio
from anyio.abc import ByteStream

from turnstile_server.errors import SandboxUnavailable
from turnstile_server.sandboxes.docker.address import EngineAddress
from turnstile_server.sandboxes.docker.exec_stream import STDERR, STDOUT
from turnstile_server.sandboxes.docker.upgrade import UpgradeRequest

_HEADER = struct.Struct(">BxxxL")
_READ_BYTES = 256 << 10
_KEPT_ERROR = 2000


class AttachedStream(ByteStream):
    """``first``: what came after the reply to the request, if anything."""

    def __init__(self, connection: ByteStream, first: bytes = b"") -> None:
        self._connection = connection
        self._buffer = bytearray(first)
        self._stream = STDOUT
        self._left = 0
        """Bytes that are still to come of the payload that has begun."""
        self._errors = b""

    @property
    def errors(self) -> str:
        """The end of what was written to standard error."""
        return self._errors.decode(errors="replace").strip()

    async def receive(self, max_bytes: int = _READ_BYTES) -> bytes:
        """Bytes of standard output. Raises EndOfStream when the container has ended, or the engine."""
        while True:
            while self._left == 0 and len(self._buffer) >= _HEADER.size:
                self._stream, self._left = _HEADER.unpack_from(self._buffer)
                del self._buffer[: _HEADER.size]
            if self._left and self._buffer:
                data = bytes(self._buffer[: min(self._left, max_bytes)])
                del self._buffer[: len(data)]
                self._left -= len(data)
                if self._stream == STDOUT:
                    return data
                if self._stream == STDERR:
                    self._errors = (self._errors + data)[-_KEPT_ERROR:]
            else:
                try:
                    self._buffer += await self._connection.receive(_READ_BYTES)
                except ssl.SSLError as error:
                    raise anyio.BrokenResourceError from error

    async def send(self, item: bytes) -> None:
        await self._connection.send(item)

    async def send_eof(self) -> None:
        raise NotImplementedError("standard input is closed with the connection")

    async def aclose(self) -> None:
        await self._connection.aclose()


async def attach(address: EngineAddress, container: str, timeout_s: float) -> AttachedStream:
    """Attaches to a container that is not started yet. Raises SandboxUnavailable."""
    try:
        with anyio.fail_after(timeout_s):
            connection = await address.connect()
            try:
                return await _upgraded(connection, container)
            except BaseException:
                with anyio.CancelScope(shield=True):
                    await anyio.aclose_forcefully(connection)
                raise
    except TimeoutError as error:
        raise SandboxUnavailable(
            f"the Docker engine took more than {timeout_s:g} s to attach to a container "
            "(sandboxes.docker_timeout_s)"
        ) from error
    except (OSError, anyio.BrokenResourceError, anyio.EndOfStream) as error:
        raise SandboxUnavailable(f"the Docker engine does not answer (attach): {error or type(error)}") from error


async def _upgraded(connection: ByteStream, container: str) -> AttachedStream:
    request = UpgradeRequest(f"/containers/{quote(container)}/attach?stream=1&stdin=1&stdout=1&stderr=1")
    await connection.send(request.to_send)
    first: bytes | None = None
    while first is None:
        first = request.feed(await connection.receive(_READ_BYTES))
    return AttachedStream(connection, first)
