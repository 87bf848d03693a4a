"""The client of the hot path against a server of raw bytes: torn, strange, early, late and too many replies."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from http_server import SILENCE_S, RawServer, ask, chunked, client_of, raw_server, waiting_calls, whole
from hypothesis import given
from hypothesis import strategies as st
from loop_clock import pass_time

from tls_support import certificates
from turnstile_server.engines import http_pool
from turnstile_server.engines.http_client import EngineHttp
from turnstile_server.engines.http_connection import BUFFERED_BYTES, HEAD_BYTES, EngineConnection
from turnstile_server.engines.http_pool import HttpAddress
from turnstile_server.errors import EngineProtocolError, EngineTimeout, EngineUnavailable
from waiting import wait_until

pytestmark = pytest.mark.anyio

BODY = b'{"a": [1, 2, 3]}'
REPLIES = {"with a length": whole(BODY), "in chunks": chunked(BODY[:5], BODY[5:])}


@pytest.fixture(autouse=True)
def no_connection_is_stale(monkeypatch: pytest.MonkeyPatch) -> None:
    """However slowly a test goes on; where an idle connection is to be dropped, the clock is moved."""
    monkeypatch.setattr(http_pool, "KEEPALIVE_S", SILENCE_S)
    monkeypatch.setattr(http_pool, "DRAIN_S", SILENCE_S)


@pytest.fixture
async def served() -> AsyncIterator[tuple[RawServer, EngineHttp]]:
    async with raw_server() as (server, port), client_of(f"http://127.0.0.1:{port}") as http:
        yield server, http


Served = tuple[RawServer, EngineHttp]


async def closed_all(server: RawServer, http: EngineHttp) -> None:
    """Returns when no connection is open on either side."""
    await server.emptied.wait()
    await wait_until(lambda: not len(http._pool))


@pytest.mark.parametrize("framed", REPLIES)
async def test_a_reply_torn_at_any_byte_is_an_error_and_never_a_shorter_reply(served: Served, framed: str) -> None:
    server, http = served
    server.hangs_up = True
    for cut in range(len(REPLIES[framed])):
        server.reply = REPLIES[framed][:cut]
        with pytest.raises(EngineUnavailable, match="connection to the engine broke"):
            await ask(http)
    assert len(server.heads) == len(REPLIES[framed]), "a request that was sent is never sent again"
    await closed_all(server, http)


@pytest.mark.parametrize("framed", REPLIES)
async def test_a_reply_in_two_pieces_or_in_single_bytes_is_the_same_reply(served: Served, framed: str) -> None:
    server, http = served
    reply = REPLIES[framed]
    for cuts in [[cut] for cut in range(1, len(reply), 3)] + [list(range(1, len(reply)))]:

        async def answer(server: RawServer, writer: asyncio.StreamWriter, cuts: list[int] = cuts) -> None:
            for start, end in zip([0, *cuts], [*cuts, len(reply)], strict=True):
                writer.write(reply[start:end])
                await asyncio.sleep(0)

        server.reply = answer
        assert await ask(http) == (200, BODY)
    assert server.connections == 1


@pytest.mark.parametrize(
    "junk",
    [
        b"\x00\x01\x02\x03",
        b"SSH-2.0-OpenSSH_9.2\r\n",
        b"HTTP/1.1 abc OK\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: x\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nContent-Length: 3\r\n\r\nabc",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"HTTP/1.1 200 OK\r\nx: " + b"a" * (HEAD_BYTES + 1),
    ],
    ids=["bytes", "another protocol", "no status", "no length", "two lengths", "no chunk", "an endless head"],
)
async def test_what_is_not_http_is_an_error_and_closes_the_connection(served: Served, junk: bytes) -> None:
    server, http = served
    server.reply = junk
    with pytest.raises(EngineUnavailable, match=r"answer is not HTTP|head of its answer"):
        await ask(http)
    await closed_all(server, http)


async def test_calls_share_a_connection_one_after_the_other(served: Served) -> None:
    server, http = served
    server.reply = whole(BODY)
    for _ in range(3):
        assert await ask(http, b'{"a":', b"[", b"1", b"]}") == (200, BODY)
    assert (server.connections, len(http._pool)) == (1, 1)
    assert server.bodies == [b'{"a":[1]}'] * 3


@pytest.mark.parametrize(
    "reply",
    [whole(BODY) + b"x", whole(BODY) + whole(b"[]"), whole(BODY, more="Connection: close\r\n")],
    ids=["a byte after it", "another reply after it", "connection: close"],
)
async def test_a_connection_that_may_be_out_of_step_is_not_used_again(served: Served, reply: bytes) -> None:
    server, http = served
    server.reply = reply
    assert await ask(http) == (200, BODY)
    server.reply = whole(b"{}")
    assert await ask(http) == (200, b"{}")
    assert server.connections == 2


async def test_a_connection_that_the_server_closed_while_it_was_idle_gets_no_request(served: Served) -> None:
    server, http = served
    server.reply, server.hangs_up = whole(BODY), True
    for _ in range(3):
        assert await ask(http) == (200, BODY)
        await closed_all(server, http)
    assert server.connections == len(server.heads) == 3


async def test_words_on_an_idle_connection_close_it(served: Served) -> None:
    server, http = served
    idle = asyncio.Event()

    async def answer(server: RawServer, writer: asyncio.StreamWriter) -> None:
        writer.write(whole(BODY))
        await idle.wait()
        writer.write(whole(b"", status="408 Request Timeout"))

    server.reply = answer
    assert await ask(http) == (200, BODY)
    idle.set()
    await server.emptied.wait()
    server.reply = whole(b"{}")
    assert await ask(http) == (200, b"{}")


async def test_idle_connections_are_closed_after_a_while(served: Served) -> None:
    server, http = served
    server.reply = whole(BODY)
    await asyncio.gather(*[ask(http) for _ in range(4)])
    pass_time(SILENCE_S)
    await closed_all(server, http)


async def test_an_interim_reply_is_not_the_reply(served: Served) -> None:
    server, http = served
    server.reply = b"HTTP/1.1 102 Processing\r\nContent-Type: text/plain\r\n\r\n" + whole(BODY)
    assert await ask(http) == (200, BODY)


async def test_a_reply_without_a_length_ends_with_its_connection(served: Served) -> None:
    server, http = served
    server.reply, server.hangs_up = b"HTTP/1.1 200 OK\r\n\r\n" + BODY, True
    async with http.send("/generate", (b"{}",), {}) as reply:
        assert reply.content_type == "application/octet-stream"
        assert await reply.body() == BODY


async def test_a_reply_that_comes_before_the_request_is_written_is_read(served: Served) -> None:
    server, http = served
    server.reply, server.reads_body = whole(BODY, status="413 Too Large"), False
    assert await ask(http, *[b"x" * (1 << 20)] * 32) == (413, BODY)
    # The rest of the request is still unwritten: the connection is of no use.
    await closed_all(server, http)


async def test_the_head_of_a_request_says_what_it_must() -> None:
    async with raw_server() as (server, port):
        server.reply = whole(BODY)
        async with client_of(f"http://me:s%20e@localhost:{port}/up/") as http:
            async with http.send("/generate", (b"{", b"}"), {"X-Session-ID": "ép"}) as reply:
                await reply.body()
            for bad in ("a\r\nb", "a\nb", "a\0b"):
                with pytest.raises(ValueError, match="line break"):
                    await http.post("/generate", (b"",), {"x": bad})
    (head,) = server.heads
    lines = head.decode().split("\r\n")
    assert lines[0] == "POST /up/generate HTTP/1.1"
    assert {
        f"Host: localhost:{port}",
        "Content-Length: 2",
        "X-Session-ID: ép",
        "Authorization: Basic bWU6cyBl",
    } < {*lines}


@pytest.mark.parametrize(
    ("url", "host", "port", "authority"),
    [
        ("http://a", "a", 80, "a"),
        ("https://a", "a", 443, "a"),
        ("http://[::1]:30000/x", "::1", 30000, "[::1]:30000"),
        ("http://bücher.example:1", "xn--bcher-kva.example", 1, "xn--bcher-kva.example:1"),
    ],
)
def test_an_address_is_read(url: str, host: str, port: int, authority: str) -> None:
    address = HttpAddress.of(url)
    assert (address.host, address.port, address.authority) == (host, port, authority)
    assert address.credentials is None


@pytest.mark.parametrize("url", ["a:1", "ftp://a", "http://", "http://a:b", "http://a:99999"])
def test_what_is_no_address_of_a_server_is_unavailable(url: str) -> None:
    with pytest.raises(EngineUnavailable, match="not the address"):
        HttpAddress.of(url)


async def test_a_server_that_is_not_trusted_is_unavailable(tmp_path: Path) -> None:
    folder = certificates(tmp_path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "cert.pem", folder / "key.pem")
    async with raw_server(context) as (server, port):
        server.reply = whole(BODY)
        async with client_of(f"https://127.0.0.1:{port}") as http:
            with pytest.raises(EngineUnavailable, match=r"cannot be reached.*certificate"):
                await ask(http)
            assert len(http._pool) == 0
            http._pool._tls = ssl.create_default_context(cafile=str(folder / "ca.pem"))
            assert await ask(http) == (200, BODY)


POINTS = ["before the head", "in the head", "after the head", "in the body"]


@pytest.mark.parametrize("how", ["cancel", "close", "timeout"])
@pytest.mark.parametrize("point", POINTS)
async def test_a_call_that_ends_early_closes_its_connection(
    point: str, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    reply = chunked(b"data: 1\n\n")
    sent = reply[: {"before the head": 0, "in the head": 20, "after the head": -24, "in the body": -8}[point]]
    came: list[bytes] = []
    receive = EngineConnection.data_received

    def received(self: EngineConnection, data: bytes) -> None:
        came.append(data)
        receive(self, data)

    monkeypatch.setattr(EngineConnection, "data_received", received)
    async with raw_server() as (server, port), client_of(f"http://127.0.0.1:{port}") as http:
        server.reply = sent

        async def read() -> None:
            async with http.send("/generate", (b"{}",), {}) as reply:
                while await reply.read():
                    pass

        call = asyncio.create_task(read())
        await server.asked.wait()
        await wait_until(lambda: b"".join(came) == sent and waiting_calls(http))
        if how == "cancel":
            call.cancel()
        elif how == "close":
            await http.close()
        else:
            pass_time(SILENCE_S)
        errors = {"cancel": asyncio.CancelledError, "close": EngineUnavailable, "timeout": EngineTimeout}
        with pytest.raises(errors[how]):
            await call
        await closed_all(server, http)


async def test_a_call_cancelled_in_any_turn_of_the_loop_leaves_nothing_open(served: Served) -> None:
    server, http = served
    server.reply = whole(BODY)
    for turns in range(30):
        call = asyncio.create_task(ask(http))
        for _ in range(turns):
            await asyncio.sleep(0)
        call.cancel()
        await asyncio.wait({call})
        assert call.cancelled() or call.result() == (200, BODY)
        assert http._slots.value == http._settings.max_connections
        assert not http.hold._limits
    await http.close()
    await closed_all(server, http)


@pytest.mark.parametrize("end", ["comes", "never comes"])
async def test_the_end_of_a_finished_stream_is_not_waited_for(served: Served, end: str) -> None:
    server, http = served
    go_on = asyncio.Event()
    reply = chunked(b"data: 1\n\n", b"data: [DONE]\n\n")

    async def answer(server: RawServer, writer: asyncio.StreamWriter) -> None:
        writer.write(reply[:-10])
        await go_on.wait()
        writer.write(reply[-10:])

    server.reply = answer
    async with http.send("/generate", (b"{}",), {}) as got:
        assert (await got.read()).startswith(b"data: 1")
        got.finish()
    assert len(http._pool) == 1
    if end == "comes":
        go_on.set()
        await wait_until(lambda: http._pool._idle)
        server.reply = whole(BODY)
        assert await ask(http) == (200, BODY)
        assert server.connections == 1
    else:
        pass_time(SILENCE_S)
        await wait_until(lambda: not len(http._pool))
        go_on.set()
        await closed_all(server, http)


async def test_a_body_above_the_limit_is_an_error(served: Served) -> None:
    server, http = served
    server.reply = chunked(*[b"x" * 1000] * 660)
    with pytest.raises(EngineProtocolError, match="max_reply_bytes"):
        await ask(http)
    await closed_all(server, http)


async def test_a_pause_holds_the_deadline_of_a_call_that_waits() -> None:
    go_on = asyncio.Event()

    async def answer(server: RawServer, writer: asyncio.StreamWriter) -> None:
        await go_on.wait()
        writer.write(whole(BODY))

    async with raw_server() as (server, port), client_of(f"http://127.0.0.1:{port}") as http:
        server.reply = answer
        http.hold.hold()
        call = asyncio.create_task(ask(http))
        await wait_until(lambda: waiting_calls(http))
        pass_time(10 * SILENCE_S)
        for _ in range(5):
            await asyncio.sleep(0)
        assert not call.done()
        http.hold.release()
        go_on.set()
        assert await call == (200, BODY)
        go_on.clear()
        call = asyncio.create_task(ask(http))
        await wait_until(lambda: waiting_calls(http))
        pass_time(SILENCE_S)
        with pytest.raises(EngineTimeout, match=r"nothing for 600 s"):
            await call


class Wire(asyncio.Transport):
    """A transport whose bytes the test gives."""

    def __init__(self) -> None:
        super().__init__()
        self.paused = self.aborted = False

    def pause_reading(self) -> None:
        assert not self.paused
        self.paused = True

    def resume_reading(self) -> None:
        assert self.paused
        self.paused = False

    def is_closing(self) -> bool:
        return self.aborted

    def abort(self) -> None:
        self.aborted = True

    def writelines(self, list_of_data: object) -> None: ...

    def get_write_buffer_size(self) -> int:
        return 0


def connected() -> tuple[EngineConnection, Wire]:
    connection, wire = EngineConnection(lambda _: None, lambda _: None), Wire()
    connection.connection_made(wire)
    connection.send((b"",))
    return connection, wire


async def test_a_reader_that_is_slow_stops_the_sender() -> None:
    connection, wire = connected()
    reply = chunked(*[b"x" * (BUFFERED_BYTES // 2)] * 5)
    step = len(reply) // 5
    connection.data_received(reply[: 2 * step])
    assert not wire.paused
    connection.data_received(reply[2 * step : 4 * step])
    assert wire.paused
    await connection.head()
    read = len(await connection.read())
    assert not wire.paused
    connection.data_received(reply[4 * step :])
    while data := await connection.read():
        read += len(data)
    assert read == BUFFERED_BYTES // 2 * 5
    assert connection.usable


async def test_a_reader_of_the_whole_stops_no_sender() -> None:
    connection, wire = connected()
    reply = whole(b"x" * (2 * BUFFERED_BYTES))
    connection.data_received(reply[:100])
    await connection.head()
    body = asyncio.create_task(connection.read_all(4 * BUFFERED_BYTES))
    await asyncio.sleep(0)
    connection.data_received(reply[100:-1])
    assert not wire.paused
    connection.data_received(reply[-1:])
    assert len(await body) == 2 * BUFFERED_BYTES


@given(data=st.data())
def test_any_pieces_of_a_reply_are_the_reply_or_an_error(data: st.DataObject) -> None:
    """Whatever bytes a reply is changed to and cut into: whole and right, or an error, or waited for."""

    async def play() -> None:
        reply = bytearray(data.draw(st.sampled_from(list(REPLIES.values()))))
        changed = data.draw(st.lists(st.tuples(st.integers(0, len(reply) - 1), st.integers(0, 255)), max_size=2))
        for at, value in changed:
            reply[at] = value
        cuts = sorted(data.draw(st.sets(st.integers(1, len(reply) - 1), max_size=4)))
        connection, wire = connected()
        for start, end in zip([0, *cuts], [*cuts, len(reply)], strict=True):
            if not wire.aborted:
                connection.data_received(bytes(reply[start:end]))
        connection.connection_lost(None)
        try:
            await connection.head()
            body = await connection.read_all(1 << 16)
        except EngineUnavailable:
            assert changed
            return
        assert connection.whole
        assert changed or body == BODY

    asyncio.run(play())
