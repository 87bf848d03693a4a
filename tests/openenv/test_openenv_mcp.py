"""``/mcp`` of the control API: raw JSON-RPC over a WebSocket, and sessions of standard clients over HTTP."""

from __future__ import annotations

import os
import shutil
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import httpx
import pytest
from mcp import ClientSession
from mcp.client.streamable_http import streamable_http_client
from openenv_support import ANSWER, REPLY_S, TASK, Wire, base_url, ended, wired
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed

from control_support import Door, OpenDoor, one_process
from waiting import wait_until

pytestmark = pytest.mark.anyio

SLOW = {"instruction": "Wait.", "base": {"inline": {"note.txt": "x"}}}


@pytest.fixture(scope="module")
def sandboxed(open_door: OpenDoor) -> Iterator[Door]:
    assert shutil.which("bwrap"), "install bubblewrap: the suites' sandboxes are made with it"
    with open_door(sandboxes={"kind": "local"}, openenv={"max_sessions": 2}) as door:
        yield door


@asynccontextmanager
async def rpc_socket(door: Door) -> AsyncIterator[Wire]:
    async with connect(base_url(door).replace("http://", "ws://") + "/mcp", proxy=None) as connection:
        yield Wire(connection)


async def call_method(wire: Wire, method: str, **params: Any) -> dict[str, Any]:
    told = await wire.ask({"jsonrpc": "2.0", "id": 1, "method": method, "params": params})
    assert (told["jsonrpc"], told["id"]) == ("2.0", 1)
    return told


async def test_a_socket_creates_a_session_lists_calls_and_closes(door: Door) -> None:
    async with rpc_socket(door) as wire:
        session = (await call_method(wire, "openenv/session/create", task=TASK))["result"]["session_id"]
        assert (await call_method(wire, "openenv/session/create"))["result"]["session_id"] == session
        [tool] = (await call_method(wire, "tools/list"))["result"]["tools"]
        assert (tool["name"], tool["inputSchema"]["type"]) == ("submit", "object")
        result = (await call_method(wire, "tools/call", name="submit", arguments={"answer": ANSWER}))["result"]
        assert (result["isError"], result["content"][0]["text"]) == (False, result["data"])
        assert (await call_method(wire, "openenv/session/close"))["result"] == {
            "session_id": session,
            "closed": True,
        }
        assert await ended(door, session) == "completed"
        following = (await call_method(wire, "openenv/session/create", task=TASK))["result"]["session_id"]
        assert following != session
    assert await ended(door, following) == "cancelled"


@pytest.mark.slow
async def test_a_socket_that_calls_a_tool_at_once_plays_a_task_of_the_server(sandboxed: Door) -> None:
    async with rpc_socket(sandboxed) as wire:
        tools = (await call_method(wire, "tools/list"))["result"]["tools"]
        by_name = {tool["name"]: tool for tool in tools}
        assert {"bash", "submit"} <= by_name.keys()
        assert {"inputSchema", "annotations"} <= by_name["bash"].keys()
        result = (await call_method(wire, "tools/call", name="bash", arguments={"command": "echo out; exit 3"}))[
            "result"
        ]
        assert result["structuredContent"]["exit_code"] == 3
        assert "out" in result["data"]


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("{", -32700),
        ("null", -32600),
        ("[]", -32600),
        ('{"jsonrpc": "2.0", "id": 1, "method": "dance"}', -32601),
        ('{"jsonrpc": "2.0", "id": 1, "method": "openenv/session/create", "params": {"task_id": "x"}}', -32602),
        ('{"jsonrpc": "2.0", "id": 1, "method": "openenv/session/create", "params": {"colour": 1}}', -32602),
        ('{"jsonrpc": "2.0", "id": 1, "method": "tools/list", "params": {"session_id": "nobody"}}', -32602),
    ],
)
async def test_a_message_that_cannot_be_answered_is_an_error_and_the_socket_goes_on(
    door: Door, text: str, code: int
) -> None:
    async with rpc_socket(door) as wire:
        assert (await wire.ask(text))["error"]["code"] == code
        assert (await call_method(wire, "ping"))["result"] == {}


async def test_a_notification_has_no_answer(door: Door) -> None:
    async with rpc_socket(door) as wire:
        await wire.send({"jsonrpc": "2.0", "method": "notifications/initialized"})
        assert (await call_method(wire, "ping"))["result"] == {}


async def test_a_socket_of_json_rpc_has_the_bounds_of_the_other(open_door: OpenDoor) -> None:
    bounds = {"max_sockets": 1, "max_ahead": 2}
    with open_door(openenv=bounds, control={"max_body_bytes": 2048}) as door:
        async with rpc_socket(door) as wire:
            assert "max_body_bytes" in (await wire.ask("x" * 3000))["error"]["message"]
            async with rpc_socket(door) as second:
                told = await second.receive()
                assert (told["error"]["code"], told["error"]["data"]["max_sessions"]) == (-32000, 1)
            await call_method(wire, "openenv/session/create", task=TASK)
            with pytest.raises(ConnectionClosed) as closed:
                await flood(wire)
            assert closed.value.rcvd is not None
            assert closed.value.rcvd.code == 1008
        async with connect(base_url(door).replace("http://", "ws://") + "/mcp", proxy=None) as binary:
            await binary.send(b"\x00")
            with pytest.raises(ConnectionClosed) as closed:
                await binary.recv()
            assert closed.value.rcvd is not None
            assert closed.value.rcvd.code == 1003


async def flood(wire: Wire) -> None:
    for _ in range(50):
        await wire.send({"jsonrpc": "2.0", "id": 1, "method": "tools/list"})
    while True:
        await wire.receive()


async def until_sleeping(seconds: str, wanted: bool) -> None:
    """Return when a sandbox of this machine runs ``sleep seconds``, or none does."""

    async def as_wanted() -> bool:
        return await _sleeps(seconds) is wanted

    await wait_until(as_wanted)


async def _sleeps(seconds: str) -> bool:
    return (await anyio.run_process(["pgrep", "-f", f"^sleep {seconds}$"], check=False)).returncode == 0


@pytest.mark.slow
@pytest.mark.parametrize("path", ["/ws", "/mcp", "http"])
async def test_a_client_that_vanishes_in_mid_call_takes_the_running_command_with_it(
    sandboxed: Door, path: str
) -> None:
    seconds = f"{os.getpid()}.{['/ws', '/mcp', 'http'].index(path)}"
    arguments = {"command": f"sleep {seconds}"}
    if path == "http":
        async with httpx.AsyncClient(base_url=base_url(sandboxed), timeout=REPLY_S) as http:
            create = {"jsonrpc": "2.0", "id": 1, "method": "openenv/session/create", "params": {"task": SLOW}}
            episode_id = (await http.post("/mcp", json=create)).json()["result"]["session_id"]
            params = {"session_id": episode_id, "name": "bash", "arguments": arguments}
            running = {"jsonrpc": "2.0", "id": 2, "method": "tools/call", "params": params}
            with pytest.raises(httpx.ReadTimeout):
                await http.post("/mcp", json=running, timeout=1.5)
            # A session outlives a request that was hung up: only the call is stopped.
            assert (await http.get(f"/episodes/{episode_id}")).json()["status"] == "running"
            await http.post(f"/episodes/{episode_id}/cancel")
    else:
        async with wired(sandboxed) if path == "/ws" else rpc_socket(sandboxed) as wire:
            if path == "/ws":
                episode_id = (await wire.reset(task=SLOW))["episode_id"]
                await wire.send(
                    {"type": "step", "data": {"type": "call_tool", "tool_name": "bash", "arguments": arguments}}
                )
            else:
                episode_id = (await call_method(wire, "openenv/session/create", task=SLOW))["result"]["session_id"]
                params = {"name": "bash", "arguments": arguments}
                await wire.send({"jsonrpc": "2.0", "id": 2, "method": "tools/call", "params": params})
            await until_sleeping(seconds, True)
            wire.connection.transport.abort()
        assert await ended(sandboxed, episode_id) == "cancelled"
    await until_sleeping(seconds, False)


@pytest.mark.slow
async def test_a_standard_client_at_the_bare_address_plays_a_task_of_its_own(sandboxed: Door) -> None:
    url = f"{base_url(sandboxed)}/mcp"
    async with streamable_http_client(url) as streams, ClientSession(streams[0], streams[1]) as session:
        with anyio.fail_after(REPLY_S):
            await session.initialize()
            assert {"bash", "submit"} <= {tool.name for tool in (await session.list_tools()).tools}
            failed = await session.call_tool("read_file", {"path": "no/such/file"})
            assert failed.is_error is True
            done = await session.call_tool("bash", {"command": "echo from-the-sandbox"})
            assert (done.is_error, done.structured_content["exit_code"]) == (False, 0)
            assert "from-the-sandbox" in done.structured_content["stdout"]
            async with httpx.AsyncClient(base_url=base_url(sandboxed), timeout=60) as http:
                [newest, *_] = (await http.get("/episodes")).json()["episodes"]
            assert newest["status"] == "running"
    # Leaving the client sends DELETE: what was played is finished.
    assert await ended(sandboxed, newest["episode_id"]) == "completed"


@pytest.mark.slow
@one_process
async def test_two_sessions_have_an_episode_each_and_one_too_many_is_told_so(sandboxed: Door) -> None:
    async with httpx.AsyncClient(base_url=base_url(sandboxed), timeout=REPLY_S) as http:

        async def opened() -> tuple[dict[str, str], dict[str, Any]]:
            hello = {"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": {}}
            answer = await http.post("/mcp", json=hello)
            return {"mcp-session-id": answer.headers.get("mcp-session-id", "")}, answer.json()

        async def ask(headers: dict[str, str], method: str, **params: Any) -> httpx.Response:
            message = {"jsonrpc": "2.0", "id": 1, "method": method, "params": params}
            return await http.post("/mcp", json=message, headers=headers)

        unused = (await opened())[0]
        first, second = (await opened())[0], (await opened())[0]
        assert (await ask(unused, "tools/list")).status_code == 404, "the oldest without an episode makes way"
        for headers, text in ((first, "one"), (second, "two")):
            bash = {"name": "bash", "arguments": {"command": f"echo {text} > mark; cat mark"}}
            assert text in (await ask(headers, "tools/call", **bash)).json()["result"]["data"]
        read = {"name": "bash", "arguments": {"command": "cat mark"}}
        assert "one" in (await ask(first, "tools/call", **read)).json()["result"]["data"]
        refused = await opened()
        assert (refused[0]["mcp-session-id"], refused[1]["error"]["type"]) == ("", "queue_full")
        for headers in (first, second):
            assert (await http.delete("/mcp", headers=headers)).status_code == 204
        assert (await http.delete("/mcp", headers=first)).status_code == 404
        assert (await http.delete("/mcp")).status_code == 400
        assert (await http.get("/mcp")).status_code == 405
