"""Handshakes of WebSockets, sandboxes' sockets and streams that stay open: what they hold is given back."""

from __future__ import annotations

import asyncio
import logging
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from urllib.parse import urlsplit

import anyio
import httpx
import pytest
from gate_support import staged
from test_connections import HEAD, QUICK, app, empty, heard
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed, InvalidStatus

from turnstile_server.http.agent_endpoint import HttpAgentEndpoint
from waiting import PATIENCE_S, wait_until

pytestmark = pytest.mark.anyio


async def test_websockets_give_their_places_back_however_they_end(tiny_model: Path, tmp_path: Path) -> None:
    async with staged(tiny_model, tmp_path) as stage:
        places = stage.control_listener.connections
        await stage.control.get("/health")
        before = len(places)
        url = str(stage.control.base_url).replace("http", "ws").rstrip("/") + "/ws"
        async with AsyncExitStack() as stack:
            sockets = [await stack.enter_async_context(connect(url, proxy=None)) for _ in range(4)]
            assert len(places) == before + 4
            await sockets[0].close()
            sockets[1].transport.abort()
        await empty(places, most=before)
        with pytest.raises((InvalidStatus, ConnectionClosed)):
            async with connect(url + "/nowhere", proxy=None) as refused:
                await refused.recv()
        await empty(places, most=before)


async def test_an_open_websocket_makes_way_for_nobody(tiny_model: Path, tmp_path: Path) -> None:
    async with staged(tiny_model, tmp_path, control={"max_connections": 8}) as stage:
        at = urlsplit(str(stage.control.base_url))
        url = f"ws://{at.netloc}/ws"
        async with connect(url, proxy=None) as kept, AsyncExitStack() as stack:
            for _ in range(30):
                await stack.enter_async_context(await anyio.connect_tcp(str(at.hostname), int(at.port or 0)))
            await kept.send('{"type": "state"}')
            with anyio.fail_after(PATIENCE_S):
                assert await kept.recv()


@pytest.mark.slow
async def test_a_handshake_at_the_model_api_is_426_and_logged_nowhere(
    tiny_model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with staged(tiny_model, tmp_path) as stage:
        episode = await stage.episode()
        url = episode["model_url"].replace("http", "ws") + "/v1/responses"
        headers = {"authorization": f"Bearer {episode['episode_key']}"}
        for _ in range(3):
            with pytest.raises(InvalidStatus) as refused:
                async with connect(url, proxy=None, additional_headers=headers):
                    """Refused before."""
            assert refused.value.response.status_code == 426
        await empty(stage.agent_listener.connections)
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


HANDSHAKE = (
    b"upgrade: websocket\r\nconnection: upgrade\r\n"
    b"sec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\nsec-websocket-version: 13\r\n\r\n"
)


@pytest.mark.parametrize(
    "head",
    [
        b"GET /ws?" + b"q" * 9_000 + b" HTTP/1.1\r\nhost: h\r\n",
        b"GET /ws HTTP/1.1\r\nhost: h\r\nx: " + b"x" * 9_000 + b"\r\n",
    ],
    ids=["path", "header"],
)
async def test_a_handshake_that_is_not_understood_is_refused_at_once(
    tiny_model: Path, tmp_path: Path, head: bytes
) -> None:
    """Such connections stayed open, unanswered, and made way for nobody: 2,048 of them, without a key, and the
    control API answered 503 to everybody for as long as their client liked."""
    async with staged(tiny_model, tmp_path) as stage:
        at = urlsplit(str(stage.control.base_url))
        async with await anyio.connect_tcp(str(at.hostname), int(at.port or 0)) as connection:
            await connection.send(head + HANDSHAKE)
            said = await heard(connection)
        assert said.startswith(b"HTTP/1.1 400 "), said
        await empty(stage.control_listener.connections, most=1)


async def test_clients_write_no_lines_of_websockets_into_the_log(
    tiny_model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Each handshake was two lines, with a path of up to 64 kB, whether or not it showed a key."""
    caplog.set_level(logging.INFO)
    async with staged(tiny_model, tmp_path, control={"key": "k" * 24, "auth": True}) as stage:
        url = str(stage.control.base_url).replace("http", "ws").rstrip("/")
        for path in (f"/k/{'k' * 24}/ws", "/k/wrong/ws?" + "q" * 30_000, "/nowhere"):
            with suppress(InvalidStatus, ConnectionClosed):
                async with connect(url + path, proxy=None) as opened:
                    await opened.send(b"\xff\xfe", text=True)
                    await opened.recv()
        await empty(stage.control_listener.connections, most=1)
        said = [record.getMessage()[:99] for record in caplog.records if record.name == "uvicorn.error"]
    assert [line for line in said if not line.startswith("Started server process")] == []


@pytest.mark.parametrize(
    "sent", [b"", HEAD, b"POST /e/one/x HTTP/1.1\r\nhost: h\r\ncontent-length: 9\r\n\r\nhalf"]
)
async def test_a_sandboxes_socket_has_the_same_deadlines(tmp_path: Path, sent: bytes) -> None:
    endpoint = HttpAgentEndpoint(app, idle_connection_s=30, max_connections=8, limits=QUICK)
    listener = await endpoint.listen_unix(tmp_path / "socket")
    listener.admit("one")
    try:
        async with await anyio.connect_unix(tmp_path / "socket") as connection:
            if sent:
                await connection.send(sent)
            said = await heard(connection)
            assert said[:12] in (b"", b"HTTP/1.1 408", b"HTTP/1.1 200")
        await empty(endpoint.connections)
    finally:
        await listener.close()


async def test_a_sandboxes_socket_serves_the_agent_app_that_comes_after_it(tmp_path: Path) -> None:
    """Backends are started, and may keep sandboxes warm, before there is an agent app."""
    endpoint = HttpAgentEndpoint(None, idle_connection_s=30, max_connections=8)
    listener = await endpoint.listen_unix(tmp_path / "socket")
    listener.admit("one")
    transport = httpx.AsyncHTTPTransport(uds=str(tmp_path / "socket"))
    try:
        async with httpx.AsyncClient(transport=transport, base_url="http://sandbox") as http:
            before = await http.get("/e/one/x")
            endpoint.attach(app)
            after, other = await http.get("/e/one/x"), await http.get("/e/two/x")
        assert [before.status_code, after.status_code, other.status_code] == [404, 200, 404]
    finally:
        await listener.close()


async def test_idle_mcp_streams_are_not_held(tiny_model: Path, tmp_path: Path) -> None:
    tools = {"max_requests_per_episode": 6}
    async with staged(tiny_model, tmp_path, tools=tools) as stage, AsyncExitStack() as stack:
        episode = await stage.episode()
        headers = {
            "x-api-key": episode["episode_key"],
            "accept": "application/json, text/event-stream",
        }
        http = await stack.enter_async_context(
            httpx.AsyncClient(headers=headers, limits=httpx.Limits(max_connections=None), timeout=PATIENCE_S)
        )
        hello = {
            "jsonrpc": "2.0",
            "id": 1,
            "method": "initialize",
            "params": {
                "protocolVersion": "2025-11-25",
                "capabilities": {},
                "clientInfo": {"name": "t", "version": "1"},
            },
        }
        tasks_before = len(asyncio.all_tasks())
        sessions = []
        for _ in range(8):
            made = await http.post(episode["tool_url"], json=hello)
            assert made.status_code == 200
            sessions.append(made.headers["mcp-session-id"])
        statuses = []
        async with AsyncExitStack() as streams:
            for session in sessions:
                stream = http.stream("GET", episode["tool_url"], headers={"mcp-session-id": session})
                statuses.append((await streams.enter_async_context(stream)).status_code)
            assert statuses == [405] * 8
            assert (await http.post(episode["tool_url"], json=hello)).status_code == 200
        await http.aclose()
        await empty(stage.agent_listener.connections)
        await stage.post(episode, "cancel")
        await wait_until(lambda: len(asyncio.all_tasks()) <= tasks_before + 2, "the tasks end")
