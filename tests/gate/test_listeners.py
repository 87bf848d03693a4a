"""Sockets of the doors."""

from __future__ import annotations

import asyncio
import socket

import pytest

from turnstile_server.errors import StartupError
from turnstile_server.listeners import bind

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
