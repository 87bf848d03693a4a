"""Sockets of the doors."""

from __future__ import annotations

import asyncio
import socket

import pytest
from starlette.types import Receive, Scope, Send

from turnstile_server.errors import StartupError
from turnstile_server.listeners import Listener, bind

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
        async with asyncio.timeout(20):
            await reader.read()  # to the end that the server makes
        writer.close()
    finally:
        listener.stop()
        await serving
        listener.close()
