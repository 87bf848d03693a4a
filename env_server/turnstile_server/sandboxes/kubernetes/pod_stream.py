"""The standard streams of a container over a WebSocket.

Wire format: Kubernetes, KEP-4006 "Transition from SPDY to WebSockets", subprotocol ``v5.channel.k8s.io``: binary
messages, the first byte of each is a channel. 0 is standard input, 1 output, 2 error, 3 a ``Status`` at the end;
255 and the number of a channel closes that one. A container's standard error is kept for the sentence that says
why its program did not start.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Final

import aiohttp
import anyio
from anyio.abc import ByteStream

ATTACH_PROTOCOL: Final = "v5.channel.k8s.io"
_STDIN, _STDOUT, _STDERR, _CLOSE = b"\x00", 1, 2, b"\xff"
_CHUNK: Final = 32 << 10
_KEPT_ERROR: Final = 2000


class PodStream(ByteStream):
    """``socket``: a connection that speaks ``ATTACH_PROTOCOL``, owned from now on."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._left = b""
        self._errors = b""
        self.ended = False
        """Nothing more comes."""

    @property
    def errors(self) -> str:
        """The end of what was written to standard error."""
        return self._errors.decode(errors="replace").strip()

    async def receive(self, max_bytes: int = 256 << 10) -> bytes:
        while not self._left:
            message = await self._socket.receive()
            self.ended = message.type is not aiohttp.WSMsgType.BINARY
            if message.type is aiohttp.WSMsgType.ERROR:
                raise anyio.BrokenResourceError from self._socket.exception()
            if self.ended:
                raise anyio.EndOfStream
            data: bytes = message.data
            if data[:1] == bytes([_STDOUT]):
                self._left = data[1:]
            elif data[:1] == bytes([_STDERR]):
                self._errors = (self._errors + data[1:])[-_KEPT_ERROR:]
        taken, self._left = self._left[:max_bytes], self._left[max_bytes:]
        return taken

    async def send(self, item: bytes) -> None:
        try:
            for start in range(0, len(item), _CHUNK):
                await self._socket.send_bytes(_STDIN + item[start : start + _CHUNK])
        except (aiohttp.ClientError, OSError) as error:
            raise anyio.BrokenResourceError from error

    async def send_eof(self) -> None:
        try:
            await self._socket.send_bytes(_CLOSE + _STDIN)
        except (aiohttp.ClientError, OSError) as error:
            raise anyio.BrokenResourceError from error

    async def drain(self) -> None:
        """Waits for the end of the container's output. Raises BrokenResourceError."""
        with suppress(anyio.EndOfStream):
            while True:
                await self.receive()

    async def aclose(self) -> None:
        await self._socket.close()
