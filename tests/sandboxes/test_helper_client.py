"""The server's side of a sandbox against misbehaving helpers: the sockets' token, the client's bounds."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import anyio
import pytest
from echo_app import EchoApp, agents_of
from stepped_clock import loop_clock

from turnstile_server.errors import SandboxFailed, SandboxUnavailable
from turnstile_server.sandboxes.background import BackgroundTasks
from turnstile_server.sandboxes.docker.address import EngineAddress
from turnstile_server.sandboxes.helper import TOKEN_VARIABLE
from turnstile_server.sandboxes.helper.turnstile_helper import frames
from turnstile_server.sandboxes.helper_client import HelperClient
from turnstile_server.sandboxes.helper_sandbox import HelperSandbox, Layout
from turnstile_server.sandboxes.protocol import Command
from turnstile_server.sandboxes.sockets import SandboxSockets
from turnstile_server.settings import SandboxSettings
from waiting import wait_until

pytestmark = pytest.mark.anyio


@pytest.fixture
async def sockets(run_dir: Path, echo_app: EchoApp, tasks: BackgroundTasks) -> AsyncIterator[SandboxSockets]:
    made = SandboxSockets(run_dir / "one", agents_of(echo_app, 3), tasks, name="one")
    await made.open()
    yield made
    await made.close()


class Caller:
    """A helper played by the test."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    @classmethod
    async def dial(cls, sockets: SandboxSockets, token: str | None = None) -> Caller:
        caller = cls(*await asyncio.open_unix_connection(sockets.folder / "helper.sock"))
        token = sockets.environment[TOKEN_VARIABLE] if token is None else token
        caller.writer.write(frames.encode({"hello": frames.VERSION, "token": token}))
        return caller

    def says(self, header: dict[str, object], payload: bytes = b"") -> None:
        self.writer.write(frames.encode(header, payload))


@pytest.fixture
async def linked(sockets: SandboxSockets) -> AsyncIterator[tuple[Caller, HelperClient]]:
    caller = await Caller.dial(sockets)
    client = await sockets.dialed_in(10)
    yield caller, client
    await client.close()
    caller.writer.close()


async def test_only_the_right_token_is_accepted(sockets: SandboxSockets) -> None:
    for wrong in ("", "x" * 43, "é"):
        caller = await Caller.dial(sockets, wrong)
        assert await caller.reader.read() == b""
        caller.writer.close()
    for nonsense in (b"GET / HTTP/1.1\r\n\r\n", frames.encode({"hello": 1}), b"\0" * 5000):
        reader, writer = await asyncio.open_unix_connection(sockets.folder / "helper.sock")
        writer.write(nonsense)
        writer.write_eof()
        assert await _closed(reader)
        writer.close()
    right = await Caller.dial(sockets)
    client = await sockets.dialed_in(10)
    await client.close()
    assert await right.reader.read() == b""
    right.writer.close()


async def _closed(reader: asyncio.StreamReader) -> bool:
    try:
        return await reader.read() == b""
    except ConnectionError:
        return True


async def test_the_token_is_good_for_one_call_and_the_socket_is_then_gone(sockets: SandboxSockets) -> None:
    silent = await asyncio.open_unix_connection(sockets.folder / "helper.sock")
    caller = await Caller.dial(sockets)
    client = await sockets.dialed_in(10)
    assert not (sockets.folder / "helper.sock").exists()
    with pytest.raises(FileNotFoundError):
        await Caller.dial(sockets)
    assert await _closed(silent[0])
    silent[1].close()
    await client.close()
    caller.writer.close()


async def test_a_helper_that_does_not_call_in_time_is_unavailable(sockets: SandboxSockets) -> None:
    with pytest.raises(SandboxUnavailable, match=r"did not call within 0\.05 s"):
        await sockets.dialed_in(0.05)


async def test_callers_that_hang_up_at_once_do_not_keep_the_helper_out(sockets: SandboxSockets) -> None:
    for _ in range(50):
        with socket.socket(socket.AF_UNIX) as hasty:
            hasty.connect(str(sockets.folder / "helper.sock"))
    caller = await Caller.dial(sockets)
    client = await sockets.dialed_in(10)
    await client.close()
    caller.writer.close()


async def test_a_helper_that_nobody_waited_for_is_cut_off_at_close(
    run_dir: Path, echo_app: EchoApp, tasks: BackgroundTasks
) -> None:
    sockets = SandboxSockets(run_dir / "two", agents_of(echo_app, 3), tasks, name="two")
    await sockets.open()
    caller = await Caller.dial(sockets)
    await wait_until(lambda: not (sockets.folder / "helper.sock").exists())
    await sockets.close()
    assert await _closed(caller.reader)
    caller.writer.close()
    assert not sockets.folder.exists()
    await sockets.close()


async def test_a_link_is_closed_in_the_turn_of_the_loop_in_which_bytes_come(
    run_dir: Path, echo_app: EchoApp, tasks: BackgroundTasks
) -> None:
    """An error in the loop itself, which nobody can catch, fails the test."""
    for turns in range(8):
        sockets = SandboxSockets(run_dir / f"link-{turns}", agents_of(echo_app, 3), tasks, name="link")
        await sockets.open()
        caller = await Caller.dial(sockets)
        client = await sockets.dialed_in(10)
        await anyio.wait_all_tasks_blocked()  # it reads
        closing = asyncio.create_task(client.close())
        for _ in range(turns):
            await asyncio.sleep(0)
        caller.says({"any": "frame"})
        await closing
        caller.writer.close()
        await sockets.close()


async def test_a_read_of_the_engine_is_cancelled_in_the_turn_of_the_loop_in_which_bytes_come(
    run_dir: Path,
) -> None:
    writers: asyncio.Queue[asyncio.StreamWriter] = asyncio.Queue()
    path = run_dir / "engine.sock"
    async with await asyncio.start_unix_server(lambda _, writer: writers.put_nowait(writer), path):
        connection = await EngineAddress(f"unix://{path}").connect()
        engine = await writers.get()
        reading = asyncio.create_task(connection.receive())
        await anyio.wait_all_tasks_blocked()
        engine.write(b"one")
        asyncio.get_running_loop().call_soon(reading.cancel)
        await asyncio.gather(reading, return_exceptions=True)
        assert reading.cancelled()
        engine.write(b"two")
        engine.close()
        assert b"".join([part async for part in connection]) == b"onetwo"
        await connection.aclose()


async def test_closing_the_sockets_cuts_their_callers(
    run_dir: Path, echo_app: EchoApp, tasks: BackgroundTasks
) -> None:
    sockets = SandboxSockets(run_dir / "three", agents_of(echo_app, 3), tasks, name="three")
    await sockets.open()
    sockets.admit("one")
    reader, writer = await asyncio.open_unix_connection(sockets.folder / "gate.sock")
    writer.write(b"GET /e/one/stream HTTP/1.1\r\nhost: x\r\n\r\n")
    await reader.readuntil(b"first")
    await sockets.close()
    assert b"second" not in await reader.read()
    await echo_app.caller_left.wait()
    writer.close()


async def test_connections_beyond_the_bound_are_closed_and_others_served(sockets: SandboxSockets) -> None:
    sockets.admit("one")
    held = [await asyncio.open_unix_connection(sockets.folder / "gate.sock") for _ in range(3)]
    for reader, writer in held:
        writer.write(b"GET /e/one/x HTTP/1.1\r\nhost: x\r\n\r\n")
        await reader.readuntil(b"GET /e/one/x 0")
    refused, refused_writer = await asyncio.open_unix_connection(sockets.folder / "gate.sock")
    with loop_clock() as clock:
        assert await clock.pass_while(_closed(refused))
    refused_writer.close()
    for _, writer in held:
        writer.close()
        await writer.wait_closed()

    async def answer() -> bytes:
        reader, writer = await asyncio.open_unix_connection(sockets.folder / "gate.sock")
        writer.write(b"GET /e/one/x HTTP/1.0\r\n\r\n")
        said = await reader.read()
        writer.close()
        return said

    assert (await wait_until(answer)).startswith(b"HTTP/1.1 200")


async def test_a_folder_too_long_for_sockets_says_which_setting_to_change(
    run_dir: Path, echo_app: EchoApp, tasks: BackgroundTasks
) -> None:
    sockets = SandboxSockets(run_dir / ("x" * 100), agents_of(echo_app, 3), tasks, name="x")
    with pytest.raises(SandboxUnavailable, match="run_dir"):
        await sockets.open()
    sockets = SandboxSockets(run_dir / "missing" / "one", agents_of(echo_app, 3), tasks, name="x")
    with pytest.raises(SandboxUnavailable, match="no sockets"):
        await sockets.open()
    assert os.listdir(run_dir) == []


@pytest.mark.parametrize(
    ("header", "payload"),
    [
        ({"id": 99, "ev": "end"}, b""),
        ({"id": 1, "ev": "surprise"}, b""),
        ({"id": 1, "ev": "out", "stream": 7}, b"x"),
        ({"id": 1, "ev": "out", "stream": 1}, b"x" * 101),
        ({"id": 1, "ev": "ack", "n": "many"}, b""),
        ({"id": 1, "ev": "ack", "n": float("inf")}, b""),
        ({"ev": "end"}, b""),
        ({"id": [1], "ev": "end"}, b""),
        ({"id": 1, "ev": "line"}, b"nobody asked"),
        ({"conn": 1, "do": "open"}, b""),
    ],
    ids=[
        "unknown request",
        "unknown event",
        "unknown stream",
        "too much output",
        "no number",
        "no finite number",
        "no id",
        "odd id",
        "unasked line",
        "carries what nobody takes",
    ],
)
async def test_a_helper_that_breaks_the_protocol_is_given_up(
    linked: tuple[Caller, HelperClient], header: dict[str, object], payload: bytes
) -> None:
    caller, client = linked
    request = client.begin({"op": "run"}, max_output=100)
    caller.says(header, payload)
    with pytest.raises(SandboxFailed, match="protocol"):
        await request.finish()
    with pytest.raises(SandboxFailed):
        client.begin({"op": "run"})


async def test_a_helper_that_reads_nothing_is_given_up_before_the_server_holds_much(
    linked: tuple[Caller, HelperClient], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, client = linked
    monkeypatch.setattr("turnstile_server.sandboxes.helper_client._MAX_QUEUED", 8 << 20)

    async def send_without_end() -> None:
        while True:
            client.send({"conn": 1, "do": "took", "n": 1}, bytes(1 << 16))
            await asyncio.sleep(0)

    with pytest.raises(SandboxFailed, match="does not read"):
        await asyncio.wait_for(send_without_end(), 60)
    assert client.lost.is_set()


async def test_a_latest_line_that_is_too_long_is_a_break(linked: tuple[Caller, HelperClient]) -> None:
    caller, client = linked
    lines: list[bytes] = []
    request = client.begin({"op": "run", "line_s": 1}, on_line=lines.append)
    caller.says({"id": 1, "ev": "line"}, b"x" * frames.MAX_LINE)
    caller.says({"id": 1, "ev": "line"}, b"x" * (frames.MAX_LINE + 1))
    with pytest.raises(SandboxFailed, match="protocol"):
        await request.finish()
    assert lines == [b"x" * frames.MAX_LINE]


@pytest.mark.parametrize("fields", [{}, {"exit_code": None}, {"exit_code": float("inf")}])
async def test_an_end_that_lacks_what_it_must_say_fails_its_command(
    run_dir: Path, echo_app: EchoApp, tasks: BackgroundTasks, fields: dict[str, object]
) -> None:
    sockets = SandboxSockets(run_dir / "two", agents_of(echo_app, 3), tasks, name="two")
    await sockets.open()
    caller = await Caller.dial(sockets)

    async def release() -> None: ...

    client = await sockets.dialed_in(10)
    sandbox = HelperSandbox("two", client, sockets, Layout(), SandboxSettings(), release, tasks)
    running = asyncio.create_task(sandbox.exec(Command(("true",))))
    await caller.reader.read(1)
    caller.says({"id": 1, "ev": "end", **fields})
    with pytest.raises(SandboxFailed, match="protocol"):
        await running
    reading = asyncio.create_task(sandbox.read("/x", 10))
    await caller.reader.read(1)
    caller.says({"id": 2, "ev": "end", **fields})
    with pytest.raises(SandboxFailed, match="protocol"):
        await reading
    await sandbox.destroy()
    caller.writer.close()


async def test_the_same_end_twice_is_a_break(linked: tuple[Caller, HelperClient]) -> None:
    caller, client = linked
    request = client.begin({"op": "run"}, max_output=100)
    for _ in range(2):
        caller.says({"id": 1, "ev": "end"})
    await request.finish()
    await client.lost.wait()


async def test_input_waits_for_what_was_sent_to_be_taken(linked: tuple[Caller, HelperClient]) -> None:
    caller, client = linked
    calling = asyncio.create_task(client.call({"op": "run"}, data=bytes(3 * frames.WINDOW), timeout_s=None))
    decoder, taken = frames.Decoder(), 0
    while taken < frames.WINDOW:
        for _, payload in decoder.feed(await caller.reader.read(1 << 16)):
            taken += len(payload)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(caller.reader.read(1), 0.1)
    caller.says({"id": 1, "ev": "ack", "n": frames.WINDOW})
    while taken < 2 * frames.WINDOW:
        for _, payload in decoder.feed(await caller.reader.read(1 << 16)):
            taken += len(payload)
    caller.says({"id": 1, "ev": "end"})
    await calling


async def test_a_request_without_an_answer_in_its_time_ends_the_connection(
    linked: tuple[Caller, HelperClient],
) -> None:
    _, client = linked
    other = client.begin({"op": "run"})
    with pytest.raises(SandboxFailed, match=r"did not answer within 0\.05 s"):
        await client.call({"op": "stop_all"}, timeout_s=0.05)
    with pytest.raises(SandboxFailed, match="did not answer"):
        await other.finish()


async def test_cancelling_a_request_asks_for_its_end_and_its_late_answer_is_no_break(
    linked: tuple[Caller, HelperClient],
) -> None:
    caller, client = linked
    waiting = asyncio.create_task(client.call({"op": "run"}, max_output=100, timeout_s=None))
    decoder = frames.Decoder()
    (first,) = decoder.feed(await caller.reader.read(1000))
    assert first[0]["op"] == "run"
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    ((header, _),) = decoder.feed(await caller.reader.read(1000))
    assert header == {"op": "kill", "id": 1}
    caller.says({"id": 1, "ev": "out", "stream": 1}, b"late")
    caller.says({"id": 1, "ev": "end"})
    answering = asyncio.create_task(client.call({"op": "stop_all"}, timeout_s=None))
    await caller.reader.read(1000)
    caller.says({"id": 2, "ev": "end", "left": 0})
    assert (await answering).fields["left"] == 0
