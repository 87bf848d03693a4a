"""A server of raw bytes on a socket of its own, for replies that no HTTP library sends, and what it saw."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from bounded import bounded, rebounded
from turnstile_server.engines.http_client import EngineHttp
from turnstile_server.engines.http_connection import EngineConnection
from turnstile_server.settings import EngineSettings

SILENCE_S = 600.0
"""No test lasts so long: where this time is to be over, the test moves the clock (``pass_time``)."""

SETTINGS = bounded(
    EngineSettings,
    kind="sglang",
    connect_timeout_s=SILENCE_S,
    first_chunk_timeout_s=SILENCE_S,
    chunk_timeout_s=SILENCE_S,
    connect_attempts=1,
    max_reply_bytes=1 << 16,
)

Answer = Callable[["RawServer", asyncio.StreamWriter], Awaitable[None]]


class RawServer:
    """Answers each request with ``reply`` as it stands then; ``hangs_up``: and closes the connection."""

    def __init__(self) -> None:
        self.reply: bytes | Answer = b""
        self.hangs_up = False
        self.reads_body = True
        self.heads: list[bytes] = []
        self.bodies: list[bytes] = []
        self.connections = 0
        self.open = 0
        self.asked = asyncio.Event()
        self.emptied = asyncio.Event()
        """No connection is open any more."""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self.open += 1
        self.emptied.clear()
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                size = int(head.lower().split(b"content-length:")[1].split(b"\r\n")[0])
                self.heads.append(head)
                if self.reads_body:
                    self.bodies.append(await reader.readexactly(size))
                self.asked.set()
                if isinstance(self.reply, bytes):
                    writer.write(self.reply)
                else:
                    await self.reply(self, writer)
                await writer.drain()
                if self.hangs_up:
                    return
                while not self.reads_body and await reader.read(1 << 16):
                    pass
        except (asyncio.IncompleteReadError, ConnectionError):
            return
        finally:
            writer.close()
            self.open -= 1
            if not self.open:
                self.emptied.set()


def whole(body: bytes, *, status: str = "200 OK", more: str = "") -> bytes:
    head = f"HTTP/1.1 {status}\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n{more}\r\n"
    return head.encode() + body


def chunked(*parts: bytes) -> bytes:
    head = (
        b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\nTransfer-Encoding: chunked\r\n\r\n"
    )
    return head + b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts) + b"0\r\n\r\n"


@asynccontextmanager
async def raw_server(tls: ssl.SSLContext | None = None) -> AsyncIterator[tuple[RawServer, int]]:
    served = RawServer()
    server = await asyncio.start_server(served.serve, "127.0.0.1", 0, ssl=tls)
    try:
        yield served, server.sockets[0].getsockname()[1]
    finally:
        server.close()


@asynccontextmanager
async def client_of(url: str, **changes: object) -> AsyncIterator[EngineHttp]:
    http = EngineHttp(url, rebounded(SETTINGS, **changes))
    await http.open()
    try:
        yield http
    finally:
        await http.close()


def waiting_calls(http: EngineHttp) -> list[EngineConnection]:
    """The connections on which a call has been sent, and waits for bytes."""
    return [one for one in http._pool._open if one._waiter is not None and not one._waiter.done()]


async def ask(http: EngineHttp, *body: bytes) -> tuple[int, bytes]:
    """One call, its reply read whole."""
    async with http.place(), http.send("/generate", body or (b"{}",), {}) as reply:
        return reply.status, await reply.body()
