"""A listener on a Unix socket takes every caller, and may be cancelled in the very moment in which one comes."""

from __future__ import annotations

import asyncio
import errno
import socket
from pathlib import Path
from typing import Any

import anyio
import pytest
from anyio.abc import SocketStream

from turnstile_server.unix_streams import serve_unix

pytestmark = pytest.mark.anyio


async def echo(stream: SocketStream) -> None:
    async with stream:
        await stream.send(await stream.receive())


async def test_every_caller_is_answered_and_a_cancel_as_one_comes_raises_nothing(tmp_path: Path) -> None:
    path = tmp_path / "s"
    listener = await anyio.create_unix_listener(path)
    problems: list[dict[str, Any]] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: problems.append(context))
    async with listener, anyio.create_task_group() as tasks:
        tasks.start_soon(serve_unix, listener, echo, tasks)
        for _ in range(3):
            async with await anyio.connect_unix(path) as client:
                await client.send(b"hm")
                assert await client.receive() == b"hm"
        await anyio.wait_all_tasks_blocked()
        with socket.socket(socket.AF_UNIX) as caller:
            caller.connect(str(path))
            loop.call_soon(tasks.cancel_scope.cancel)  # runs before what the loop then sees of the socket
            await anyio.sleep_forever()
    assert problems == []


async def test_a_listener_that_can_take_none_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "s"
    async with await anyio.create_unix_listener(path) as listener, anyio.create_task_group() as tasks:
        with socket.socket(socket.AF_UNIX) as caller:
            caller.connect(str(path))

            def exhausted(_: socket.socket) -> Any:
                raise OSError(errno.EMFILE, "Too many open files")

            monkeypatch.setattr(socket.socket, "accept", exhausted)
            with pytest.raises(anyio.BrokenResourceError) as raised:
                await serve_unix(listener, echo, tasks)
    assert isinstance(raised.value.__cause__, OSError)
