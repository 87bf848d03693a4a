"""The sockets of both listeners."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator

import pytest
from starlette.types import Receive, Scope, Send

from turnstile_server.errors import StartupError
from turnstile_server.http.listeners import Listener, bind

pytestmark = pytest.mark.anyio


async def test_answers_of_several_writes_are_not_delayed() -> None:
    """Nagle's algorithm with a client's delayed acknowledgement costs 40 ms a reply."""
    accepted: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    async def note(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        accepted.set_result(writer.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
        writer.close()

    bound = bind("test", "127.0.0.1", 0)
    async with await asyncio.start_server(note, sock=bound):
        _, writer = await asyncio.open_connection(*bound.getsockname())
        assert await accepted
        writer.close()


def test_a_port_in_use_is_refused_with_what_to_do() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(StartupError, match=r"--control-port"):
            bind("control", "127.0.0.1", taken.getsockname()[1])


def test_an_address_that_is_not_this_machines_is_refused_by_that() -> None:
    with pytest.raises(StartupError, match="--agent-host"):
        bind("agent", "192.0.2.1", 0)


@pytest.mark.slow
async def test_an_idle_connection_is_closed_after_its_time() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    listener = Listener(app, bound := bind("test", "127.0.0.1", 0), idle_s=1, grace_s=1, access_log=False)
    serving = asyncio.create_task(listener.serve())
    try:
        reader, writer = await asyncio.open_connection(*bound.getsockname())
        writer.write(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        assert (await reader.readline()).startswith(b"HTTP/1.1 204")
        async with asyncio.timeout(60):
            await reader.read()  # to the end that the server makes
        writer.close()
    finally:
        listener.stop()
        await serving
        listener.close()


_HEAD = b"POST / HTTP/1.1\r\nhost: x\r\n"
_CHUNKED = _HEAD + b"transfer-encoding: chunked\r\n\r\n"


@pytest.mark.parametrize(
    ("begin", "more"),
    [
        (b"POST /", b"x" * 4096),
        (_HEAD, b"h: " + b"v" * 4096 + b"\r\n"),
        (_HEAD + b"h: ", b"v" * 4096),
        (_CHUNKED + b"2\r\nhi\r\n0\r\n", b"h: " + b"v" * 4096 + b"\r\n"),
    ],
    ids=["path", "headers", "one-header", "trailers"],
)
async def test_a_request_with_a_head_without_end_costs_its_connection(begin: bytes, more: bytes) -> None:
    async with echo() as (reader, writer):
        writer.write(begin)
        sent = 0
        with contextlib.suppress(ConnectionError):
            async with asyncio.timeout(60):
                while sent < 64 << 20 and not reader.at_eof():
                    writer.write(more)
                    await writer.drain()
                    await asyncio.sleep(0)
                    sent += len(more)
        assert sent < 16 << 20
        with contextlib.suppress(ConnectionError):
            answer = await reader.read()
            assert answer.startswith(b"HTTP/1.1 431") or not answer


async def test_large_bodies_and_many_requests_of_one_connection_are_not_heads() -> None:
    async with echo() as (reader, writer):
        body = b"b" * (1 << 20)
        for _ in range(3):
            writer.write(_HEAD + b"content-length: %d\r\n\r\n" % len(body) + body)
            assert await _length(reader) == len(body)
        chunks = b"".join(b"%x\r\n%s\r\n" % (200, b"c" * 200) for _ in range(2000))
        writer.write(_CHUNKED + chunks + b"0\r\n\r\n")
        assert await _length(reader) == 400_000
        for _ in range(40):
            writer.write(_HEAD + b"h: " + b"v" * 4096 + b"\r\ncontent-length: 1\r\n\r\n.")
            assert await _length(reader) == 1


async def _length(reader: asyncio.StreamReader) -> int:
    """What the echo says of the size of a body."""
    async with asyncio.timeout(60):
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200"), head
        return int(await reader.readexactly(8))


@contextlib.asynccontextmanager
async def echo() -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A connection to a listener that answers with the size of what it was sent."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        size, more = 0, True
        while more:
            message = await receive()
            size += len(message.get("body", b""))
            more = message.get("more_body", False)
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"8")]})
        await send({"type": "http.response.body", "body": b"%08d" % size})

    listener = Listener(app, bound := bind("test", "127.0.0.1", 0), idle_s=5, grace_s=1, access_log=False)
    serving = asyncio.create_task(listener.serve())
    reader, writer = await asyncio.open_connection(*bound.getsockname())
    try:
        yield reader, writer
    finally:
        writer.close()
        listener.stop()
        await serving
        listener.close()
