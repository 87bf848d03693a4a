"""The connection that a sandbox has dialled, as the byte stream to its helper."""

from __future__ import annotations

import ssl

import anyio
from anyio.abc import ByteStream
from anyio.streams.tls import TLSStream


class DialledStream(ByteStream):
    """Owns ``connection``."""

    def __init__(self, connection: TLSStream) -> None:
        self._connection = connection
        self.ended = False
        """The other side has ended it, or something between has."""

    async def receive(self, max_bytes: int = 65536) -> bytes:
        """Raises EndOfStream, BrokenResourceError."""
        try:
            return await self._connection.receive(max_bytes)
        except ssl.SSLError as error:
            self.ended = True
            raise anyio.BrokenResourceError from error
        except (anyio.EndOfStream, anyio.BrokenResourceError):
            self.ended = True
            raise

    async def send(self, item: bytes) -> None:
        try:
            await self._connection.send(item)
        except ssl.SSLError as error:
            raise anyio.BrokenResourceError from error

    async def send_eof(self) -> None:
        raise NotImplementedError("both directions end together")

    async def aclose(self) -> None:
        await anyio.aclose_forcefully(self._connection)
