"""Connections that owe something: slow, idle, silent, too many, or with clients that do not read."""

from __future__ import annotations

import asyncio
import logging
import resource
import socket
import struct
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import anyio
import anyio.lowlevel
import anyio.to_thread
import pytest
from anyio.abc import SocketStream
from conversation import body, raw, reply_ids, url
from gate_support import Said, Stage, says, staged
from starlette.types import ASGIApp, Receive, Scope, Send
from stepped_clock import loop_clock
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from turnstile_server.http.acceptor import Acceptor
from turnstile_server.http.agent_endpoint import HttpAgentEndpoint
from turnstile_server.http.connections import ConnectionLimits, Connections, Seat, admit
from turnstile_server.http.listeners import Listener, bind
from waiting import PATIENCE_S, wait_until

pytestmark = pytest.mark.anyio

HEAD = b"GET / HTTP/1.1\r\nhost: 127.0.0.1\r\n"
QUICK = ConnectionLimits(8, head_timeout_s=0.4, send_timeout_s=0.6, body_stall_s=0.4)
"""Only where the time-out that a test waits for is all that can end."""
SLOW = ConnectionLimits(8, head_timeout_s=60, send_timeout_s=60, body_stall_s=60)
"""Longer than a busy machine takes for a step of a test."""


async def app(scope: Scope, receive: Receive, send: Send) -> None:
    """``/admitted`` waits until the client hangs up, ``/stranger`` the same without a key; ``/large``: 64 MB;
    ``/echo`` returns the body."""
    if scope["path"] == "/admitted":
        admit(scope)
    if scope["path"] in ("/admitted", "/stranger"):
        while (await receive())["type"] != "http.disconnect":
            pass
        return
    if scope["path"] == "/echo":
        said = bytearray()
        while (message := await receive()).get("more_body"):
            said += message["body"]
        said += message["body"]
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": bytes(said)})
        return
    size = 64 << 20 if scope["path"] == "/large" else 2
    headers = [(b"content-length", str(size).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": b"o" * size})


@asynccontextmanager
async def listening(limits: ConnectionLimits = SLOW, app: ASGIApp = app) -> AsyncIterator[Listener]:
    listener = Listener(
        app, bind("test", "127.0.0.1", 0), idle_s=30, grace_s=0, access_log=False, limits=limits, websockets=False
    )
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(listener.serve)
        try:
            yield listener
        finally:
            listener.stop()


async def connected(listener: Listener, sent: bytes = b"") -> SocketStream:
    connection = await anyio.connect_tcp(*listener._socket.getsockname()[:2])
    if sent:
        await connection.send(sent)
    return connection


async def heard(connection: SocketStream) -> bytes:
    """All that the server says until it closes the connection."""
    said = b""
    with anyio.fail_after(PATIENCE_S):
        try:
            while True:
                said += await connection.receive()
        except (anyio.EndOfStream, anyio.BrokenResourceError):
            return said


async def empty(connections: Connections, most: int = 0) -> None:
    await wait_until(lambda: len(connections) <= most, f"{most} connections are left")


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[Seat | None]:
    """What each connection that the server has accepted got: a place, or None."""
    noted: list[Seat | None] = []
    take = Connections.take

    def note(self: Connections, owner: str = "") -> Seat | None:
        noted.append(take(self, owner))
        return noted[-1]

    monkeypatch.setattr(Connections, "take", note)
    return noted


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[HttpToolsProtocol]:
    """The connections on which the server has read something, each time that it has."""
    noted: list[HttpToolsProtocol] = []
    receive = HttpToolsProtocol.data_received

    def note(self: HttpToolsProtocol, data: bytes) -> None:
        receive(self, data)
        noted.append(self)

    monkeypatch.setattr(HttpToolsProtocol, "data_received", note)
    return noted


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"", b""),
        (b"\r\n", b"HTTP/1.1 408 "),
        (b"GET /", b"HTTP/1.1 408 "),
        (HEAD, b"HTTP/1.1 408 "),
        (HEAD + b"x-slow: ", b"HTTP/1.1 408 "),
        (HEAD + b"upgrade: websocket\r\nconnection: upgrade\r\n", b"HTTP/1.1 408 "),
        (HEAD + b"\r\n" + b"GET /", b"HTTP/1.1 200 OK"),
    ],
    ids=["silence", "newlines", "method", "headers", "header", "websocket", "second-request"],
)
async def test_a_head_that_never_ends_is_closed_however_it_drips(sent: bytes, status: bytes) -> None:
    async with listening() as listener:
        loop = asyncio.get_running_loop()
        began = loop.time()
        connection = await connected(listener, sent)

        async def drip() -> None:
            while sent:
                await anyio.sleep(1)  # of the clock that is moved
                try:
                    await connection.send(b"\r\n" if sent == b"\r\n" else b"x")
                except (anyio.BrokenResourceError, anyio.ClosedResourceError):
                    return

        async with connection, anyio.create_task_group() as tasks:
            tasks.start_soon(drip)
            with loop_clock() as clock:
                said = await clock.pass_while(heard(connection))
            tasks.cancel_scope.cancel()
        assert said.startswith(status)
        assert not said if not status else b"request_timeout" in said
        assert loop.time() - began >= SLOW.head_timeout_s
        await empty(listener.connections)


@pytest.mark.parametrize("protocol", [b"h2c", b"websocket"])
@pytest.mark.parametrize("length", [b"content-length: 38", b"transfer-encoding: chunked"])
async def test_a_body_beside_an_upgrade_is_never_read_as_a_request(protocol: bytes, length: bytes) -> None:
    """It was: behind a proxy that shares its connections, another client would have had the second response."""
    head = (
        b"POST / HTTP/1.1\r\nhost: h\r\nconnection: upgrade\r\nupgrade: "
        + protocol
        + b"\r\n"
        + length
        + b"\r\n\r\n"
    )
    async with listening() as listener, await connected(listener, head) as connection:
        said = await connection.receive()  # so the body comes alone
        with suppress(anyio.BrokenResourceError, anyio.ClosedResourceError):
            await connection.send(HEAD + b"\r\n")
        said += await heard(connection)
        assert said.startswith(b"HTTP/1.1 400 ")
        assert b"send it without Upgrade" in said
        assert said.count(b"HTTP/1.1 ") == 1
        await empty(listener.connections)


async def test_an_upgrade_without_a_body_is_ignored() -> None:
    async with listening() as listener:
        asked = HEAD + b"connection: upgrade\r\nupgrade: h2c\r\ncontent-length: 0\r\n\r\n"
        async with await connected(listener) as connection:
            for _ in range(2):
                await connection.send(asked)
                said = b""
                while not said.endswith(b"oo"):
                    said += await connection.receive()
                assert said.startswith(b"HTTP/1.1 200 OK")


async def test_what_came_while_the_event_loop_stood_still_is_answered() -> None:
    async with listening() as listener:
        with socket.create_connection(listener._socket.getsockname()[:2], timeout=PATIENCE_S) as client:
            await wait_until(lambda: len(listener.connections))
            client.send(HEAD + b"\r\n")
            with loop_clock() as clock:
                clock.jump(2 * SLOW.head_timeout_s)
            listener.connections._swept()  # uvloop runs timers that are due before it reads
            assert (await anyio.to_thread.run_sync(client.recv, 1000)).startswith(b"HTTP/1.1 200 OK")


@pytest.mark.parametrize("callback", ["on_message_begin", "on_url", "on_header", "on_headers_complete"])
async def test_a_request_for_which_memory_is_lacking_is_not_called_a_wrong_one(
    monkeypatch: pytest.MonkeyPatch, callback: str
) -> None:
    def lacking(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(HttpToolsProtocol, callback, lacking)
    async with listening() as listener, await connected(listener, HEAD + b"\r\n") as connection:
        said = await heard(connection)
    assert said.startswith(b"HTTP/1.1 503 ")
    assert b"server_exhausted" in said
    await empty(listener.connections)


async def test_what_comes_at_once_is_parsed_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    parse = HttpToolsProtocol.data_received

    def noted(protocol: HttpToolsProtocol, data: bytes) -> None:
        sizes.append(len(data))
        parse(protocol, data)

    monkeypatch.setattr(HttpToolsProtocol, "data_received", noted)
    head = b"POST /echo HTTP/1.1\r\nhost: h\r\ntransfer-encoding: chunked\r\n\r\n"
    chunks = b"".join(b"1\r\n%c\r\n" % (97 + index % 26) for index in range(40_000))
    async with listening() as listener:
        async with await connected(listener, head + chunks + b"0\r\n\r\n" + HEAD) as connection:
            await connection.send(b"connection: close\r\n\r\n")
            said = await heard(connection)
        assert said.count(b"HTTP/1.1 200 OK") == 2
        assert bytes(97 + index % 26 for index in range(40_000)) in said
        await empty(listener.connections)
    assert max(sizes) <= 2048
    assert sum(sizes) == len(head + chunks) + len(b"0\r\n\r\n" + HEAD + b"connection: close\r\n\r\n")


async def test_the_rest_of_a_body_of_known_length_is_one_part_and_nothing_else_is_in_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pieces: list[bytes] = []
    parse = HttpToolsProtocol.data_received

    def noted(protocol: HttpToolsProtocol, data: bytes) -> None:
        pieces.append(data)
        parse(protocol, data)

    monkeypatch.setattr(HttpToolsProtocol, "data_received", noted)
    body = b"~" * 60_000
    head = b"POST /echo HTTP/1.1\r\nhost: h\r\ncontent-length: %d\r\n\r\n" % len(body)
    many = HEAD + b"".join(b"x-%d: 1\r\n" % index for index in range(100)) + b"x-long: " + b"y" * 4096 + b"\r\n"
    async with listening() as listener:
        async with await connected(listener, head + body + many) as connection:
            await connection.send(b"connection: close\r\n\r\n")
            said = await heard(connection)
        assert said.count(b"HTTP/1.1 200 OK") == 2
        assert body in said
        await empty(listener.connections)
    large = [piece for piece in pieces if len(piece) > 2048]
    assert large
    assert all(set(piece) == set(b"~") for piece in large)
    assert b"".join(pieces) == head + body + many + b"connection: close\r\n\r\n"


async def test_the_rest_of_a_refused_body_is_not_waited_for() -> None:
    async with listening(QUICK) as listener:
        request = b"POST / HTTP/1.1\r\nhost: h\r\ncontent-length: 100\r\n\r\nhalf"
        async with await connected(listener, request) as connection:
            assert (await heard(connection)).startswith(b"HTTP/1.1 200 OK")
        await empty(listener.connections)


@pytest.mark.slow
@pytest.mark.parametrize("reads", [False, True], ids=["nothing", "drops"])
async def test_a_client_that_reads_nothing_is_cut_off(reads: bool) -> None:
    async with listening(QUICK) as listener:
        client = socket.socket()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(listener._socket.getsockname())
        with client:
            client.sendall(b"GET /large HTTP/1.1\r\nhost: h\r\nconnection: close\r\n\r\n")
            await anyio.wait_readable(client)
            if reads:
                client.recv(10)
            await empty(listener.connections)


async def test_a_slow_reader_that_takes_bytes_gets_all_of_them() -> None:
    async with (
        listening() as listener,
        await connected(listener, b"GET /large HTTP/1.1\r\nhost: h\r\n\r\n") as slow,
    ):
        loop = asyncio.get_running_loop()
        taken, began = 0, loop.time()
        with loop_clock() as clock:
            while taken < 64 << 20:
                taken += len(await slow.receive(256 << 10))
                await clock.let_pass(0.5)
        assert loop.time() - began > SLOW.send_timeout_s


async def test_who_serves_nobody_makes_way_and_who_is_served_stays(taken: list[Seat | None]) -> None:
    limits = ConnectionLimits(6, head_timeout_s=600, send_timeout_s=600, body_stall_s=600)
    begun: list[Scope] = []
    served_now: list[Scope] = []

    async def noted(scope: Scope, receive: Receive, send: Send) -> None:
        served_now.append(scope)
        try:
            asked = app(scope, receive, send)
            begun.append(scope)
            await asked
        finally:
            served_now.remove(scope)

    async with listening(limits, noted) as listener, AsyncExitStack() as stack:

        async def connect(sent: bytes) -> SocketStream:
            """Returns when the server has accepted it, and serves its request where that is whole."""
            places, requests = len(taken), len(begun)
            connection = await stack.enter_async_context(await connected(listener, sent))
            await wait_until(lambda: len(taken) > places)
            if b"\r\n\r\n" in sent and taken[-1] is not None:
                await wait_until(lambda: len(begun) > requests)
            return connection

        served = await connect(b"GET /admitted HTTP/1.1\r\nhost: h\r\n\r\n")
        silent = await connect(b"")
        half = await connect(HEAD)
        stranger = await connect(b"GET /stranger HTTP/1.1\r\nhost: h\r\ncontent-length: 9\r\n\r\nhal")
        idle = await connect(HEAD + b"\r\n")
        assert (await idle.receive()).startswith(b"HTTP/1.1 200")
        last = await connect(b"GET /admitted HTTP/1.1\r\nhost: h\r\n\r\n")
        for gone in (silent, half, stranger, idle):
            await connect(b"GET /admitted HTTP/1.1\r\nhost: h\r\n\r\n")
            assert await heard(gone) == b""
        refused = await connect(HEAD + b"\r\n")
        said = await heard(refused)
        assert said.startswith(b"HTTP/1.1 503 ")
        assert b"x-should-retry: true" in said
        assert b"too_many_connections" in said
        assert len(served_now) == 6, "those that are served, and the four for whom others made way"
        for stays in (served, last):
            with anyio.move_on_after(0) as silence:
                await stays.receive()
            assert silence.cancelled_caught


async def test_a_flood_of_silent_connections_keeps_nobody_out_and_leaves_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    limits = ConnectionLimits(50, head_timeout_s=60)
    async with listening(limits) as listener:
        address = listener._socket.getsockname()
        flood = [socket.create_connection(address) for _ in range(400)]
        for _ in range(10):
            async with await connected(listener, HEAD + b"connection: close\r\n\r\n") as honest:
                assert (await heard(honest)).startswith(b"HTTP/1.1 200")
        assert len(listener.connections) <= 50
        for one in flood:
            one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            one.close()
        await empty(listener.connections)
    assert [record for record in caplog.records if record.levelno > logging.WARNING] == []


async def test_a_sandbox_keeps_to_its_own_connections(tmp_path: Path, taken: list[Seat | None]) -> None:
    limits = ConnectionLimits(12, head_timeout_s=60, send_timeout_s=60, body_stall_s=60)
    endpoint = HttpAgentEndpoint(app, idle_connection_s=30, max_connections=8, limits=limits)
    greedy, other = [await endpoint.listen_unix(tmp_path / name) for name in ("greedy", "other")]
    request = b"GET /e/one/x HTTP/1.1\r\nhost: h\r\n\r\n"
    held = b"GET /e/one/admitted HTTP/1.1\r\nhost: h\r\n\r\n"
    try:
        for listener in (greedy, other):
            listener.admit("one")
        async with AsyncExitStack() as stack:
            for _ in range(20):
                connection = await stack.enter_async_context(await anyio.connect_unix(tmp_path / "greedy"))
                await connection.send(held.replace(b"/e/one/admitted", b"/e/one/admitted"))
            await wait_until(lambda: len(taken) == 20)
            assert len(endpoint.connections) <= 8
            for _ in range(3):
                async with await anyio.connect_unix(tmp_path / "other") as honest:
                    await honest.send(request)
                    assert (await honest.receive()).startswith(b"HTTP/1.1 200")
    finally:
        await greedy.close()
        await other.close()
    await empty(endpoint.connections)


@contextmanager
def no_descriptors() -> Iterator[None]:
    """Takes every descriptor that the process may still open."""

    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken = [socket.socket() for _ in range(10)]
    resource.setrlimit(resource.RLIMIT_NOFILE, (taken[-1].fileno() + 1, before[1]))
    try:
        while True:
            try:
                taken.append(socket.socket())
            except OSError:
                break
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
        for one in taken:
            one.close()


@pytest.mark.parametrize("reserve", [0, 8])
async def test_a_listener_outlives_a_lack_of_descriptors(monkeypatch: pytest.MonkeyPatch, reserve: int) -> None:
    pauses: list[Acceptor] = []
    pause = Acceptor._pause

    def noted(self: Acceptor) -> None:
        pauses.append(self)
        pause(self)

    monkeypatch.setattr(Acceptor, "_pause", noted)
    bound = bind("test", "127.0.0.1", 0)
    with bound:
        loop = asyncio.get_running_loop()
        made: list[asyncio.Protocol] = []

        class Hello(asyncio.Protocol):
            def connection_made(self, transport: asyncio.BaseTransport) -> None:
                made.append(self)
                assert isinstance(transport, asyncio.Transport)
                transport.write(b"hello")
                transport.close()

        acceptor = Acceptor(bound, Hello, places=8, reserve=reserve)
        acceptor.start()
        clients = [socket.socket() for _ in range(2)]
        for client in clients:
            client.setblocking(False)
        try:
            with no_descriptors():
                for client in clients:
                    await loop.sock_connect(client, bound.getsockname())
                if reserve:
                    await wait_until(lambda: len(made) == 2)
                else:
                    await wait_until(lambda: len(pauses) == 3, "it tries again and again")
                    assert made == []
            for client in clients:
                assert await loop.sock_recv(client, 100) == b"hello"
        finally:
            acceptor.close()
            for client in clients:
                client.close()


@pytest.mark.parametrize(
    "request_",
    [
        b"POST / HTTP/1.1\r\nhost: h\r\ncontent-length: 3\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
        b"POST / HTTP/1.1\r\nhost: h\r\ncontent-length: 3\r\ncontent-length: 4\r\n\r\nabcd",
        b"POST / HTTP/1.1\r\nhost: h\r\ncontent-length: +3\r\n\r\nabc",
        b"POST / HTTP/1.1\r\nhost: h\r\ncontent-length: 99999999999999999999999\r\n\r\nabc",
        b"POST / HTTP/1.1\r\nhost: h\r\ntransfer-encoding: xchunked\r\n\r\n0\r\n\r\n",
        b"POST / HTTP/1.1\r\nhost: h\r\ntransfer-encoding: chunked, identity\r\n\r\n0\r\n\r\n",
        b"POST / HTTP/1.1\r\nhost: h\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
        b"GET / HTTP/1.1\r\nhost : h\r\n\r\n",
        b"GET / HTTP/1.1\r\n folded: h\r\n\r\n",
        b"GET / HTTP/1.1\r\nhost: h\x00\r\n\r\n",
        b"GET / HTTP/9.9\r\nhost: h\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 5000 + b"\r\n",
        b"GET /" + b"x" * 200_000 + b" HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\r\nx: " + b"y" * 200_000 + b"\r\n\r\n",
    ],
    ids=range(16),
)
async def test_a_request_that_could_be_read_in_two_ways_is_refused(
    request_: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    second = b"GET /second HTTP/1.1\r\nhost: h\r\n\r\n"
    async with listening() as listener, await connected(listener) as connection:
        with suppress(anyio.BrokenResourceError):
            await connection.send(request_ + second)
        said = await heard(connection)
        assert said.count(b"HTTP/1.1 ") <= 1, said
        assert said[:12] in (b"", b"HTTP/1.1 400", b"HTTP/1.1 431"), said
        await empty(listener.connections)
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


async def test_requests_sent_ahead_are_answered_one_by_one_and_a_flood_of_them_ends_the_connection(
    read: list[HttpToolsProtocol],
) -> None:
    async with listening() as listener:
        async with await connected(listener, (HEAD + b"\r\n") * 2 + HEAD + b"connection: close\r\n\r\n") as polite:
            said = await heard(polite)
            assert 2 <= said.count(b"HTTP/1.1 200 OK") <= 3
        flood = b"GET /admitted HTTP/1.1\r\nhost: h\r\n\r\n" + (HEAD + b"\r\n") * 20_000
        async with await connected(listener, flood) as greedy:
            read.clear()
            await wait_until(lambda: read)
            for _ in range(3):  # what the server would read of the flood it reads before it has served these
                async with await connected(listener, HEAD + b"connection: close\r\n\r\n") as honest:
                    assert (await heard(honest)).startswith(b"HTTP/1.1 200")
            [protocol] = listener._server.server_state.connections
            assert len(protocol.pipeline) <= 1  # type: ignore[union-attr]
            await greedy.aclose()
        await empty(listener.connections)


# The whole server


ENDPOINTS = ["/v1/chat/completions", "/v1/messages", "/v1/responses", "/mcp", "/v1/models", "/nothing"]


def _control(stage: Stage) -> dict[str, Any]:
    return {"model_url": str(stage.control.base_url).rstrip("/"), "episode_key": "none"}


@asynccontextmanager
async def _connection(at: dict[str, Any], sent: str) -> AsyncIterator[SocketStream]:
    target = urlsplit(at["model_url"])
    async with await anyio.connect_tcp(str(target.hostname), int(target.port or 0)) as connection:
        await connection.send(sent.format(path=target.path, key=at["episode_key"]).encode())
        yield connection


@pytest.mark.slow
@pytest.mark.parametrize("hang_up", ["fin", "rst"])
async def test_a_hang_up_while_a_body_is_sent_is_logged_nowhere_and_leaves_nothing(
    tiny_model: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    read: list[HttpToolsProtocol],
    hang_up: str,
) -> None:
    async with staged(tiny_model, tmp_path) as stage:
        episode = await stage.episode()
        control = [
            (_control(stage), path) for path in ("/episodes", "/engine/pause", "/reset", "/mcp", "/events", "/x")
        ]
        before = len(asyncio.all_tasks())
        for at, path in [*((episode, path) for path in ENDPOINTS), *control]:
            post = f"POST {{path}}{path} HTTP/1.1\r\nhost: 127.0.0.1\r\n"
            for key in ("{key}", "wrong"):
                for framing in ("content-length: 100000", "transfer-encoding: chunked"):
                    head = f"{post}x-api-key: {key}\r\n{framing}\r\n\r\n"
                    read.clear()
                    async with _connection(at, head + "400\r\n{{" * 30) as connection:
                        await wait_until(lambda: read)
                        for _ in range(5):  # the request comes to wait for the rest of its body
                            await anyio.lowlevel.checkpoint()
                        if hang_up == "rst":
                            raw_socket = connection.extra(anyio.abc.SocketAttribute.raw_socket)
                            raw_socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        await empty(stage.agent_listener.connections)
        await empty(stage.control_listener.connections, most=1)
        await wait_until(lambda: len(asyncio.all_tasks()) <= before + 2, "the tasks end")
        stage.engine.answers = [says(reply_ids(stage, "fine"))]
        async with raw(episode) as client:
            assert (await client.post(url(episode), json=body())).status_code == 200
    warnings = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert {record.name for record in warnings} <= {"turnstile_server.http.wrong_keys"}, "one word of those"


async def test_half_requests_to_every_endpoint_end_and_the_server_answers_meanwhile(
    tiny_model: Path, tmp_path: Path
) -> None:
    limits = {"head_timeout_s": 60, "body_stall_s": 60, "max_connections": 40}
    async with staged(tiny_model, tmp_path, gate=limits, control=limits) as stage, AsyncExitStack() as stack:
        episode, control = await stage.episode(), _control(stage)
        paths = [*((episode, path) for path in ENDPOINTS)]
        paths += [(control, path) for path in ("/episodes", "/events", "/metrics", "/health", "/mcp", "/ws")]
        for at, path in paths:
            rest = f"{{path}}{path} HTTP/1.1\r\nhost: 127.0.0.1\r\n"
            half = "content-length: 9\r\n\r\n"
            for head in (f"GET {rest}", f"POST {rest}x-api-key: {{key}}\r\n{half}", f"POST {rest}{half}"):
                for _ in range(3):
                    await stack.enter_async_context(_connection(at, head))
        stage.engine.answers = [says(reply_ids(stage, "fine"))]
        async with raw(episode) as client:
            assert (await client.post(url(episode), json=body())).status_code == 200
            assert (await stage.control.get("/health")).status_code == 200
        agent, control_side = stage.agent_listener.connections, stage.control_listener.connections
        with loop_clock() as clock:
            await clock.pass_until(lambda: not len(agent) and len(control_side) <= 1)


@pytest.mark.slow
async def test_a_stream_that_nobody_reads_ends_with_its_call(tiny_model: Path, tmp_path: Path) -> None:
    async def talks(_: Any) -> AsyncIterator[Said | Exception]:
        for _ in range(20_000):
            yield Said(ids)
            await anyio.lowlevel.checkpoint()
        yield Said(ids, "stop")

    quick = {"send_timeout_s": 0.5}
    async with staged(tiny_model, tmp_path, gate=quick) as stage:
        ids = reply_ids(stage, "words and words and words and words and words and words and words and words")[:-1]
        stage.engine.answers = [talks]
        episode = await stage.episode()
        at = urlsplit(url(episode))
        import json

        asked = json.dumps(body(stream=True))
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.connect((at.hostname, at.port))
            client.sendall(
                f"POST {at.path} HTTP/1.1\r\nhost: h\r\nx-api-key: {episode['episode_key']}\r\n"
                f"content-length: {len(asked)}\r\n\r\n{asked}".encode()
            )
            await wait_until(lambda: stage.engine.calls and stage.engine.calls[0].aborted.is_set())
            await empty(stage.agent_listener.connections)


@pytest.mark.parametrize("chunked", [True, False])
async def test_a_body_of_large_and_small_parts_comes_whole(chunked: bool) -> None:
    sizes = [5_000, 1, 1, 2_048, 70_000, 3, 300_000, 2_047, 9_000]
    parts = [bytes([at + 65]) * size for at, size in enumerate(sizes)]
    head = b"POST /echo HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\n"
    if chunked:
        head += b"transfer-encoding: chunked\r\n\r\n"
        sent = [b"%x\r\n%b\r\n" % (len(part), part) for part in parts] + [b"0\r\n\r\n"]
    else:
        head += b"content-length: %d\r\n\r\n" % sum(sizes)
        sent = parts
    async with listening() as listener:
        for pieces in ([head, *sent], [head + b"".join(sent)]):  # in many writes and in one
            async with await connected(listener) as connection:
                for piece in pieces:
                    await connection.send(piece)
                    await anyio.lowlevel.checkpoint()
                said = await heard(connection)
            coded = said.partition(b"\r\n\r\n")[2]
            lines = b"".join(parts)
            assert lines in coded
